"""verl's published speed-ups come out of its synchronous step times and one tail parameter."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "published_speedups.py"


@pytest.fixture(scope="module")
def published() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published_speedups", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_one_sigma_predicts_three_cluster_sizes(published: ModuleType) -> None:
    """One number is fitted to three: two of them are predictions."""
    for case in published.MATH:
        assert abs(published.predict(case, 0.345, batches=20).error) < 0.1, case.name


def test_the_multi_turn_case_has_a_tail_of_its_own(published: ModuleType) -> None:
    """One number fitted to one: it shows that the model can say it, and no more."""
    assert abs(published.predict(published.MULTI_TURN[0], 0.27, batches=20).error) < 0.1
