"""Children are real processes: modules of a few lines, found through PYTHONPATH."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """`modules(name, code)` makes `python -m name` run that code."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))

    def write(name: str, code: str) -> str:
        (folder / f"{name}.py").write_text(code)
        return name

    return write


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`supervise(restarts=0)` runs a supervisor of the modules fake_queue, fake_learner and fake_rollouter."""
    started: list[subprocess.Popen[str]] = []

    def start(restarts: int = 0) -> subprocess.Popen[str]:
        script = Path(__file__).with_name("supervise.py")
        process = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "run"), str(restarts)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
