"""SIGKILL and SIGSTOP of each process, at random moments of a run whose processes are all real.

The engine alone is a cheap one. After the run: it finished, the accounts hold, no trajectory was trained on twice, and
a replay makes every version as it was published. `benchmarks/soak.py` does the same on and on.
"""

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ordeal import KINDS, ROLES, faults_of, inflict, outcome
from small_run import SmallRun, save_small_model

STEPS, PATIENCE = 12, 120.0


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def test_each_process_killed_and_stopped_at_random_moments(small_model: Path, tmp_path: Path) -> None:
    chance = random.Random(os.environ.get("FAULTS_SEED", "0"))
    kinds = [(role, kind) for role in ROLES for kind in KINDS]
    kinds.remove(("supervisor", "kill"))  # all start anew after it, and that takes long; the soak has it
    chance.shuffle(kinds)
    faults = faults_of(kinds, STEPS, chance, longest=1.5)
    run = SmallRun(tmp_path, small_model, steps=STEPS, seed=1)
    try:
        inflicted = inflict(faults, run, PATIENCE)
        code = run.process.wait(PATIENCE)
    except (TimeoutError, subprocess.TimeoutExpired) as late:
        pytest.fail(f"{late}; {faults}\n{run.said()}")
    finally:
        run.end()
    assert code == 0, run.said()
    found = outcome(run, inflicted)
    assert found.wrong == [], f"{faults}: {found.wrong}"
    assert inflicted == {f"{role} {kind}": 1 for role, kind in kinds}
    assert found.trajectories >= STEPS * 3 * 4
