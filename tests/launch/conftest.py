"""Children are real processes: modules of a few lines, found through PYTHONPATH."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from whole_run import Whole

HERE = Path(__file__).parent


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """`modules(name, code)` makes `python -m name` run that code."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (folder, HERE, HERE.parent / "queue", HERE.parents[1]))))

    def write(name: str, code: str) -> str:
        (folder / f"{name}.py").write_text(code)
        return name

    return write


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`supervise(restarts=0)` runs a supervisor of the modules fake_queue, fake_learner and fake_rollouter."""
    started: list[subprocess.Popen[str]] = []

    def start(restarts: int = 0, steps: int = 3, heldout: str = "") -> subprocess.Popen[str]:
        config = {
            "model": {"path": "m"},
            "environment": {"path": "e.py:e"},
            "tasks": {"train": "t.jsonl", "heldout": heldout},
            "run": {"restarts": restarts, "steps": steps},
            "rollout": {"group": 2},
            "learner": {"batch": 2},
            "staleness": {"depth": 1.0, "cutoff": 2},
            "observe": {"wandb": "off"},
        }
        process = subprocess.Popen(
            [sys.executable, str(HERE / "supervise.py"), str(tmp_path / "run"), msgspec.json.encode(config).decode()],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def whole(
    modules: Callable[[str, str], str], supervise: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> Whole:
    for name in ("queue", "learner", "rollouter"):
        modules(f"fake_{name}", f"import whole\nwhole.{name}()")
    return Whole(tmp_path / "run", supervise)
