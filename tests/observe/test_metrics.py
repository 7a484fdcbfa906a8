"""metrics.jsonl: every step is there, whatever wandb does, and no name is a typo."""

import ast
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.config import Config, EnvironmentSection, ModelSection, ObserveSection, RunDir, TasksSection
from slipstream.observe.metrics import MetricsWriter, read_metrics
from slipstream.observe.names import METRICS, check


def config(wandb: Any) -> Config:
    return Config(
        model=ModelSection(path="m"),
        environment=EnvironmentSection(path="e.py:e"),
        tasks=TasksSection(train="t.jsonl"),
        observe=ObserveSection(wandb=wandb),
    )


def test_every_step_is_read_as_it_was_written(tmp_path: Path) -> None:
    writer = MetricsWriter(RunDir(tmp_path), config("off"))
    writer.log(1, {"reward/mean": 0.5, "reward/exact_match": 0.25, "time/learner/publishing": 2.0})
    writer.log(2, {"reward/mean": float("nan"), "lr": 1e-3})
    writer.close()
    first, second = read_metrics(RunDir(tmp_path))
    assert (first["step"], first["reward/mean"], first["reward/exact_match"]) == (1, 0.5, 0.25)
    assert "reward/mean" not in second  # what is not finite is null there, and absent here
    assert second["lr"] == 1e-3


def test_a_name_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    writer = MetricsWriter(RunDir(tmp_path), config("off"))
    with pytest.raises(KeyError, match="rewards/mean"):
        writer.log(1, {"rewards/mean": 0.5})
    for name in METRICS:
        check(name)


def test_a_step_made_again_replaces_the_first_and_a_torn_line_is_passed_over(tmp_path: Path) -> None:
    lines = b'{"step":1,"lr":1}\n{"step":2,"lr":2}\n{"step":3,"lr":3}\n{"step":2,"lr":20}\n{"step":4,"l'
    RunDir(tmp_path).metrics.write_bytes(lines)
    assert [(values["step"], values["lr"]) for values in read_metrics(RunDir(tmp_path))] == [(1, 1), (2, 20), (3, 3)]


def test_a_writer_that_comes_after_one_that_was_cut_off_spoils_nothing(tmp_path: Path) -> None:
    RunDir(tmp_path).metrics.write_bytes(b'{"step":1,"lr":1}\n{"step":2,"l')
    for step in (2, 3):
        writer = MetricsWriter(RunDir(tmp_path), config("off"))
        writer.log(step, {"lr": float(step)})
        writer.close()
    assert [(values["step"], values["lr"]) for values in read_metrics(RunDir(tmp_path))] == [(1, 1), (2, 2), (3, 3)]
    assert RunDir(tmp_path).metrics.read_bytes().count(b"\n") == 4


def test_names_are_those_that_are_written_and_no_others() -> None:
    """Of the learner's report every name is known; of those that are known each is written somewhere."""
    package = Path(slipstream.__file__).parent
    written = _names(package / "learner" / "report.py")
    assert len(written) > 30
    for name in written:
        check(name)
    known = {name for name in METRICS if not name.endswith("*")}
    assert known - written - {"lr"} == set()


def _names(path: Path) -> set[str]:
    strings = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
    return {text for text in strings if isinstance(text, str) and re.fullmatch(r"[a-z]+/[a-z0-9_]+", text)}


def test_no_file_is_no_steps(tmp_path: Path) -> None:
    assert read_metrics(RunDir(tmp_path)) == []


@pytest.mark.parametrize("breaks", ["init", "log", "finish"])
def test_wandb_may_fail_at_any_point(
    breaks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_if(name: str) -> None:
        if name == breaks:
            raise RuntimeError("the network is away")

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            fail_if("log")

        def finish(self) -> None:
            fail_if("finish")

    def init(**_: Any) -> Run:
        fail_if("init")
        return Run()

    fake = types.SimpleNamespace(init=init, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    writer = MetricsWriter(RunDir(tmp_path), config("offline"))
    for step in (1, 2, 3):
        writer.log(step, {"lr": float(step)})
    writer.close()
    assert [values["lr"] for values in read_metrics(RunDir(tmp_path))] == [1, 2, 3]
    assert sum("the network is away" in record.message for record in caplog.records) == 1
