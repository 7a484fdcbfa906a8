"""A run of `whole.py`'s processes that goes on, and how to meddle with it."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from slipstream.config import RunDir

SECONDS = 60.0


class Whole:
    def __init__(self, root: Path, supervise: Callable[..., "subprocess.Popen[str]"]) -> None:
        self.root, self._supervise = root, supervise
        self.root.mkdir()

    def start(self, **settings: Any) -> None:
        self.running = self._supervise(**{"restarts": 3, "heldout": "h.jsonl", **settings})

    def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert self.running.poll() is None, self.running.communicate()[0]
            assert time.monotonic() < deadline, f"waited {SECONDS:.0f} s for {what}"
            time.sleep(0.02)

    def pid(self, name: str) -> int:
        self.until(lambda: (self.root / f"{name}.pid").is_file() and (self.root / f"{name}.pid").read_text(), name)
        return int((self.root / f"{name}.pid").read_text())

    def tell(self, name: str, text: str = "") -> None:
        (self.root / name).with_suffix(".new").write_text(text)
        (self.root / name).with_suffix(".new").rename(self.root / name)

    def steps(self) -> int:
        path = RunDir(self.root).metrics
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    def output(self) -> str:
        output, _ = self.running.communicate(timeout=SECONDS)
        pids = [int(path.read_text()) for path in self.root.glob("*.pid")]
        assert len(pids) == 3
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
        return output

    def summary(self) -> dict[str, Any]:
        return json.loads(RunDir(self.root).summary.read_bytes())
