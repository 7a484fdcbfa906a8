"""From a run to its page: RUN/report.html, or the same while the run goes on.

Invariant: the page loads nothing: style, script and numbers are inside, and its policy lets nothing else in. What came
from a run is escaped. It is whole on the disk, or the one before is.
"""

import base64
import hashlib
import os
import time
from collections.abc import Sequence
from importlib import resources

import jinja2
import msgspec

from slipstream.config import Config, RunDir
from slipstream.configfile import keys
from slipstream.errors import UserError
from slipstream.observe.advise import Advice, health
from slipstream.observe.summary import Summary
from slipstream.report.charts import sections
from slipstream.report.figure import Chart, Figure
from slipstream.report.history import History
from slipstream.report.svg import drawn, left_edge
from slipstream.viewer.folder import script_safe

PAGE = resources.files("slipstream.report") / "page"

Row = tuple[str, ...]


class Tile(msgspec.Struct, frozen=True):
    """A number that is read first."""

    name: str
    value: str
    more: str = ""
    mood: str = ""  # "good" | "bad"


class _Setting(msgspec.Struct, frozen=True):
    key: str
    value: str
    default: str

    @property
    def set(self) -> bool:
        return self.value != self.default


class _Line(msgspec.Struct):
    name: str
    ys: list[float | None]


class _Data(msgspec.Struct):
    """What a chart says under the cursor."""

    x: str
    xs: list[str]
    places: list[float]
    share: bool
    heat: bool
    series: list[_Line]


def write_report(config: Config, run_dir: RunDir) -> None:
    """Raises UserError when the run has nothing to show, or the disk does not take the page."""
    history = History(run_dir)
    history.read()
    page = page_of(run_dir.root.name, body_of(config, run_dir, history, _advice(config, run_dir, history)))
    draft = run_dir.report.with_suffix(".draft")
    try:
        draft.write_text(page, encoding="utf-8")
        os.replace(draft, run_dir.report)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise UserError(
            f"{run_dir.report}: cannot be written: {error.strerror}; make room, or free the name"
        ) from error


def page_of(title: str, body: str, *, live: bool = False) -> str:
    """`live`: the page fetches its body itself, from beside its own address."""
    names = ("report.css", "report.js", "watch.js") if live else ("report.css", "report.js")
    style, *parts = ((PAGE / name).read_text(encoding="utf-8") for name in names)
    script = "\n".join(parts)
    return _template("page.html").render(
        title=title,
        body=body,
        live=live,
        made=time.strftime("%Y-%m-%d %H:%M:%S"),
        style=style,
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        connect="'self'" if live else "'none'",
    )


def body_of(config: Config, run_dir: RunDir, history: History, advice: list[str], now: Sequence[Row] = ()) -> str:
    """HTML. `now`: what each process does."""
    return _template("body.html").render(
        tiles=tiles(run_dir, history),
        now=now,
        advice=advice,
        sections=sections(history),
        drawn=drawn,
        data=lambda chart: script_safe(_data(chart)).decode(),
        config=[_Setting(key.dotted, key.of(config), key.default) for key in keys()],
    )


def _template(name: str) -> jinja2.Template:
    # Everything that is put in is escaped, but where a template says that it is markup already.
    return jinja2.Environment(autoescape=True).from_string((PAGE / name).read_text(encoding="utf-8"))


# -- numbers ---------------------------------------------------------------------------------------------------------


def tiles(run_dir: RunDir, history: History) -> list[Tile]:
    if run_dir.summary.is_file():
        return _of_summary(msgspec.json.decode(run_dir.summary.read_bytes(), type=Summary))
    last = history.metrics[-1] if history.metrics else {}
    generated, trained, flying = (
        f"{last.get(f'tokens/{name}', 0):,.0f}" for name in ("generated", "trained", "in_flight")
    )
    return [
        Tile("steps", f"{last.get('step', 0):.0f}"),
        Tile("reward of the last step", f"{last['reward/mean']:.3f}" if "reward/mean" in last else "none yet"),
        Tile("tokens", generated, f"generated; {trained} trained, {flying} in flight"),
        Tile("staleness", f"{last.get('staleness/mean', 0.0):.2f}", "versions, mean of the last step"),
    ]


def _of_summary(summary: Summary) -> list[Tile]:
    share = [
        f"{value:.1%}" if value is not None else "not measured"
        for value in (summary.heldout_before, summary.heldout_after)
    ]
    hold = "hold" if summary.accounts_hold else "DO NOT HOLD"
    return [
        Tile("held-out pass rate", share[1], f"{share[0]} before"),
        Tile(
            "steps", f"{summary.steps:,}", f"{summary.train_wall_s:,.0f} s of training, {summary.wall_s:,.0f} s in all"
        ),
        Tile("tokens", f"{summary.tokens_generated:,}", f"generated; {summary.tokens_trained:,} trained"),
        Tile("accounts", hold, summary.accounts, "good" if summary.accounts_hold else "bad"),
        Tile("staleness", f"{summary.staleness_mean:.2f}", f"versions, mean; {summary.staleness_max} at most"),
        Tile("busy", f"{summary.busy.engine:.0%}", f"engine; learner {summary.busy.learner:.0%}"),
        Tile("restarts", str(summary.restarts), "of processes", "bad" if summary.restarts else ""),
    ]


def _advice(config: Config, run_dir: RunDir, history: History) -> list[str]:
    """The advisor's sentences; of a run that is too young for a simulation, what its metrics say of its health."""
    from slipstream.simulator.advisor import advise

    try:
        report = advise(run_dir)
        found, notes = report.sentences, report.notes
    except UserError as error:
        found, notes = health(config, history.metrics), [f"nothing was simulated: {error}"]
    return [advice.sentence for advice in [*found, *map(Advice, notes)]]


# -- what a chart says under the cursor -------------------------------------------------------------------------------


def _data(chart: Chart) -> _Data:
    if isinstance(chart, Figure):
        lines, share = [_Line(s.name, [_rounded(y) for y in s.ys]) for s in chart.series], chart.share
    else:
        lines = [
            _Line(f"{row}:", [_rounded(y) for y in cells]) for row, cells in zip(chart.rows, chart.cells, strict=True)
        ]
        share = True
    places = [round(left_edge(chart, index), 1) for index in range(len(chart.xs))]
    return _Data(chart.x, chart.xs, places, share, not isinstance(chart, Figure), lines)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
