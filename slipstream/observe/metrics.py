"""Metrics of a run: a line a step in metrics.jsonl, and the same to wandb.

Invariant: metrics.jsonl has every step that was logged, whatever becomes of wandb: its failures cost one warning.
"""

import logging
import math
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from slipstream.config import Config, RunDir
from slipstream.observe.names import check

log = logging.getLogger(__name__)


class MetricsWriter:
    def __init__(self, run_dir: RunDir, config: Config) -> None:
        self._file = run_dir.metrics.open("ab", buffering=0)
        if not _ends_whole(run_dir.metrics):  # a line that was cut off when its writer died stands alone
            self._file.write(b"\n")
        self._wandb: Any = self._start_wandb(run_dir, config) if config.observe.wandb != "off" else None

    def _start_wandb(self, run_dir: RunDir, config: Config) -> Any:
        os.environ.setdefault("WANDB_SILENT", "true")
        try:
            import wandb

            return wandb.init(
                project=config.observe.project,
                name=run_dir.root.name,
                dir=run_dir.root,
                mode=config.observe.wandb,  # pyright: ignore[reportArgumentType]
                config=msgspec.to_builtins(config),
                settings=wandb.Settings(console="off", x_disable_stats=True),
            )
        except Exception as error:  # whatever wandb raises, the run goes on
            log.warning("no wandb (observe.wandb = %s): %s", config.observe.wandb, error)
            return None

    def log(self, step: int, values: dict[str, float]) -> None:
        """One step. Raises KeyError for a name that is not in `names.py`; what is not finite becomes null."""
        for name in values:
            check(name)
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(msgspec.json.encode({"step": step, "time": time.time(), **finite}) + b"\n")
        self._guard(lambda run: run.log(finite, step=step))

    def close(self) -> None:
        self._file.close()
        self._guard(lambda run: run.finish())

    def _guard(self, call: Any) -> None:
        if self._wandb is None:
            return
        try:
            call(self._wandb)
        except Exception as error:
            log.warning("wandb failed and is left alone from here on: %s", error)
            self._wandb = None


def read_metrics(run_dir: RunDir) -> list[dict[str, float]]:
    """The steps so far, oldest first, each once: a step made again after a crash replaces the first. A line that is
    still being written, or never was to its end, is passed over."""
    if not run_dir.metrics.is_file():
        return []
    steps: dict[float, dict[str, float]] = {}
    for line in run_dir.metrics.read_bytes().split(b"\n")[:-1]:
        try:
            values = msgspec.json.decode(line, type=dict[str, float | None])
        except msgspec.DecodeError:
            continue
        kept = {name: value for name, value in values.items() if value is not None}
        steps[kept["step"]] = kept
    return [steps[step] for step in sorted(steps)]


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read() in (b"", b"\n")
