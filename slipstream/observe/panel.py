"""Progress for a person: one live panel on a terminal, one line a step elsewhere.

Invariant: it is told everything (`Progress`) and asks nobody; showing never changes what it shows.
"""

from types import TracebackType

import msgspec
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"


class Progress(msgspec.Struct, kw_only=True):
    stage: str
    step: int
    steps: int
    heldout: list[str]  # "version 0: 31.5% of 200"
    rewards: list[float]  # by step
    metrics: dict[str, float]  # of the last step
    trajectories: int
    accounts: str
    restarts: int
    why: str  # what is waited for


class Display:
    """Use as a context manager; `update` as often as you like, `say` for what must not be lost."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
        self._last = ("", 0)

    def __enter__(self) -> "Display":
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(self, progress: Progress) -> None:
        if self._live:
            self._live.update(_panel(progress))
            return
        if progress.stage != self._last[0]:
            self.say(progress.stage)
        if progress.step != self._last[1]:
            self.say(_line(progress))
        self._last = (progress.stage, progress.step)


def _line(progress: Progress) -> str:
    get = progress.metrics.get
    return (
        f"step {progress.step}/{progress.steps}  reward {get('reward/mean', 0):.3f}  "
        f"generated {get('throughput/generated_tok_s', 0):.0f} tok/s  trained {get('throughput/trained_tok_s', 0):.0f} "
        f"tok/s  staleness {get('staleness/mean', 0):.2f}/{get('staleness/max', 0):.0f}  ess {get('is/ess', 0):.3f}  "
        f"zero-signal groups {get('groups/zero_signal', 0):.0f}"
    )


def _panel(progress: Progress) -> Panel:
    get = progress.metrics.get
    table = Table.grid(padding=(0, 2))
    rows = {
        "stage": progress.stage,
        "step": f"{progress.step} of {progress.steps}",
        "held out": ", ".join(progress.heldout) or "-",
        "reward": f"{get('reward/mean', 0):.3f}  {sparkline(progress.rewards)}",
        "tokens/s": f"{get('throughput/generated_tok_s', 0):.0f} generated, "
        f"{get('throughput/trained_tok_s', 0):.0f} trained",
        "staleness": f"mean {get('staleness/mean', 0):.2f}, max {get('staleness/max', 0):.0f}",
        "trajectories": f"{progress.trajectories:,}",
        "accounts": progress.accounts,
        "restarts": str(progress.restarts),
        "waiting for": progress.why or "nothing",
    }
    for name, value in rows.items():
        table.add_row(name, Text(value))  # a reason may have square brackets
    return Panel(table, title="slipstream", title_align="left")


def sparkline(values: list[float], width: int = 40) -> str:
    """The last `width` values as bars between their least and greatest."""
    shown = values[-width:]
    if not shown:
        return ""
    low, span = min(shown), max(shown) - min(shown) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in shown)
