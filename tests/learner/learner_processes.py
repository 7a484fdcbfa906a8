"""Queue and learner as processes of their own. They fork from a server that has imported torch once.

The learner's metrics go to RUN/metrics.jsonl as they are handed over.
"""

import asyncio
import json
import logging
import sys
import types
from pathlib import Path

import msgspec

from slipstream.config import Config, RunDir
from slipstream.observe.names import check
from slipstream.task import Task


class Recorder:
    def __init__(self, run_dir: RunDir, config: Config) -> None:
        self._file = run_dir.metrics.open("a")

    def log(self, step: int, values: dict[str, float]) -> None:
        for name in values:
            check(name)
        self._file.write(json.dumps({"step": step, **values}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


sys.modules["slipstream.observe.metrics"] = types.ModuleType("slipstream.observe.metrics")
sys.modules["slipstream.observe.metrics"].MetricsWriter = Recorder  # type: ignore[attr-defined]

# After the line above, which is what the learner writes to.
import transformers  # noqa: E402, F401
from transformers import Qwen3ForCausalLM  # noqa: E402, F401

from slipstream.learner import process  # noqa: E402
from slipstream.queue import broker  # noqa: E402


def _log_to(path: Path) -> None:
    logging.basicConfig(filename=path, level=logging.INFO, format="%(name)s %(message)s", force=True)


def run_queue(config: dict, root: str) -> None:
    run_dir = RunDir(Path(root))
    _log_to(run_dir.root / "queue.log")
    tasks = [Task(id=f"task {number}", prompt="?") for number in range(7)]
    asyncio.run(broker.serve(msgspec.convert(config, Config), run_dir, tasks, []))


def run_learner(config: dict, root: str) -> None:
    run_dir = RunDir(Path(root))
    _log_to(run_dir.root / "learner.log")
    sys.exit(process.run(msgspec.convert(config, Config), run_dir))
