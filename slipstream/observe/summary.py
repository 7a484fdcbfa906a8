"""What a run came to: summary.json, and the same for a person.

Invariant: every number is taken from the queue's accounts, the metrics or a clock; what was not measured is null.
"""

from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text


class Busy(msgspec.Struct):
    """Share of the training window spent at work."""

    engine: float
    learner: float


class ToolSummary(msgspec.Struct):
    """Since the rollouters' last start, over all of them."""

    name: str
    calls: int
    errors: int
    p50_ms: float | None
    p99_ms: float | None

    def __str__(self) -> str:
        said = f"{self.name}: {self.calls:,} calls, {self.errors:,} in vain"
        return said if self.p50_ms is None else f"{said}, p50 {self.p50_ms:g} ms, p99 {self.p99_ms:g} ms"


class Summary(msgspec.Struct, kw_only=True):
    heldout_before: float | None
    heldout_after: float | None
    steps: int
    wall_s: float
    train_wall_s: float
    tokens_generated: int
    tokens_trained: int
    staleness_mean: float
    staleness_max: int
    accounts_hold: bool
    accounts: str  # the identity, with its numbers
    weights_pause_ms_p50: float | None
    mismatch_kl_k3: float | None
    restarts: int
    busy: Busy
    tools: list[ToolSummary] = []
    trajectories: str
    wandb: str

    def write(self, path: Path) -> None:
        draft = path.with_suffix(".draft")
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2))
        draft.rename(path)

    def show(self, console: Console, path: Path) -> None:
        table = Table(title="Summary", show_header=False, title_justify="left")
        rows = {
            "held-out pass rate": f"{_percent(self.heldout_before)} before, {_percent(self.heldout_after)} after",
            "steps": f"{self.steps} in {self.train_wall_s:.0f} s of training, {self.wall_s:.0f} s in all",
            "tokens": f"{self.tokens_generated:,} generated, {self.tokens_trained:,} trained",
            "accounts": f"{'hold' if self.accounts_hold else 'DO NOT HOLD'}: {self.accounts}",
            "staleness": f"mean {self.staleness_mean:.2f}, max {self.staleness_max} versions",
            "busy": f"engine {self.busy.engine:.0%}, learner {self.busy.learner:.0%}",
            "tools": "\n".join(map(str, self.tools)) or "none was called",
            "weights": "not loaded"
            if self.weights_pause_ms_p50 is None
            else f"generation paused {self.weights_pause_ms_p50:.0f} ms a version (median)",
            "restarts": str(self.restarts),
            "trajectories": self.trajectories,
            "wandb": self.wandb,
            "this as JSON": str(path),
        }
        for name, value in rows.items():
            table.add_row(name, Text(value))  # a path may have square brackets
        console.print(table)


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{share:.1%}"
