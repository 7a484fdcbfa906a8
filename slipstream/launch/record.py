"""What the supervisor sees of a run, kept for the panel and the summary.

Invariant: it only adds up what the queue, the clocks and the metrics say; a process that was started again begins its
clock anew, so that differences are added and never totals.
"""

import statistics
import time
from itertools import pairwise

from slipstream.config import Config, RunDir
from slipstream.observe.metrics import read_metrics
from slipstream.observe.panel import Progress
from slipstream.observe.summary import Busy, Summary, ToolSummary
from slipstream.queue.audit import RunAccounts, accounts
from slipstream.queue.messages import Accounts, RollouterBeat, Status
from slipstream.tooluse import ToolUse, together

SILENT_SECONDS = 10.0  # without an answer of the queue, after which what it said last is old news


class Record:
    def __init__(self, config: Config, run_dir: RunDir) -> None:
        self._config, self._run_dir = config, run_dir
        self._began = time.monotonic()
        self._train_from: float | None = None
        self._train_to: float | None = None
        self._status: Status | None = None
        self._at_version: Status | None = None  # the first status with the newest version
        self._since_version = self._began
        self._journal: RunAccounts | None = None
        self._answered = self._began  # when the queue last said something
        self._metrics: list[dict[str, float]] = []
        self._metrics_size = -1
        self._beats: dict[str, RollouterBeat] = {}
        self._generating = 0.0  # seconds, in the training window, over all rollouters
        self._pauses: list[float] = []

    def training_began(self) -> None:
        self._train_from = time.monotonic()

    def training_ended(self) -> None:
        self._train_to = time.monotonic()

    def observe(self, status: Status) -> bool:
        """Take in a status; whether anything moved since the last."""
        before, self._status = self._status, status
        self._answered = time.monotonic()
        if self._at_version is None or self._at_version.version != status.version:
            self._at_version, self._since_version = status, self._answered
        for beat in status.rollouters:
            self._observe_beat(beat)
        self._read_metrics()
        return (
            before is None
            or before.leases.delivered != status.leases.delivered
            or before.version != status.version
            or [result.ended for result in before.heldout] != [result.ended for result in status.heldout]
        )

    def read_journal(self) -> None:
        """After the queue left without a last word: it was never asked, hung, or was killed."""
        self._read_metrics()
        if (self._run_dir.journal / "ledger.log").is_file():
            self._journal = accounts(self._run_dir)

    def _read_metrics(self) -> None:
        size = self._run_dir.metrics.stat().st_size if self._run_dir.metrics.exists() else 0
        if size != self._metrics_size:
            self._metrics_size = size
            self._metrics = read_metrics(self._run_dir)

    def _observe_beat(self, beat: RollouterBeat) -> None:
        last = self._beats.get(beat.name)
        if last is not None and last.clock == beat.clock:
            return  # the same beat again
        self._beats[beat.name] = beat
        self._pauses.extend(beat.pause_ms)
        if self._train_from is not None and self._train_to is None and last is not None:
            self._generating += grown([reading.clock.parts.get("generating", 0.0) for reading in (last, beat)])

    def progress(self, stage: str, restarts: int) -> Progress:
        status = self._status
        assert status is not None
        return Progress(
            stage=stage,
            step=int(self._metrics[-1]["step"]) if self._metrics else 0,
            steps=self._config.run.steps,
            heldout=heldout_lines(status),
            rewards=[values.get("reward/mean", 0.0) for values in self._metrics],
            metrics=self._metrics[-1] if self._metrics else {},
            trajectories=status.trajectories.generated,
            accounts=identity(status.tokens),
            restarts=restarts,
            why=status.why,
        )

    def waits(self) -> str:
        """What everybody waits for, by name."""
        status = self._status
        silent = time.monotonic() - self._answered
        if status is None or silent > SILENT_SECONDS:
            return f"the queue has not answered for {silent:.0f} s"
        clocks = [beat.clock for beat in status.rollouters] + ([status.learner] if status.learner else [])
        said = [f"{clock.process}: {clock.now}{f' ({clock.why})' if clock.why else ''}" for clock in clocks]
        if not status.rollouters:
            said.insert(0, f"no rollouter was heard of lately (see {self._run_dir.logs / 'rollouter-0.log'})")
        return "; ".join([*said, f"queue: {status.why or 'leases flow'}"])

    def barren(self, seconds: float) -> str:
        """Why deliveries flow and no step is made, when that goes on for `seconds`; "" when it does not."""
        since = time.monotonic() - self._since_version
        training = self._train_from is not None and self._train_to is None
        if not training or self._status is None or self._at_version is None or since < seconds:
            return ""
        before, now = self._at_version.trajectories, self._status.trajectories
        equal, made = now.zero_signal - before.zero_signal, now.generated - before.generated
        if not equal:
            return ""
        return (
            f"no step for {since:.0f} s: of {made:,} trajectories since the last one, {equal:,} were in groups whose "
            f"rewards are all equal, which teach nothing; the tasks may be too hard or too easy for the model "
            f"(slipstream show {self._run_dir.root} --trajectory N), the reward may never vary, or "
            f"rollout.group = {self._config.rollout.group} be too small"
        )

    def summary(self, restarts: int) -> Summary:
        status = self._status
        steps = self._metrics
        now = time.monotonic()
        train_s = ((self._train_to or now) - self._train_from) if self._train_from is not None else 0.0
        trained = sum(values.get("tokens/step_trained", 0.0) for values in steps)
        stale = sum(values.get("staleness/mean", 0.0) * values.get("tokens/step_trained", 0.0) for values in steps)
        learning = grown([0.0, *(values.get("time/learner/forward_backward", 0.0) for values in steps)])
        mismatch = [values["mismatch/kl_k3"] for values in steps if "mismatch/kl_k3" in values]  # not when not finite
        counts = self._journal or (
            RunAccounts(status.tokens, status.trajectories, status.leases) if status else RunAccounts()
        )
        tokens = counts.tokens
        last = max((result.version for result in status.heldout), default=0) if status else 0
        return Summary(
            heldout_before=self._pass_rate(0),
            heldout_after=self._pass_rate(last) if last else None,
            steps=int(steps[-1]["step"]) if steps else 0,
            wall_s=round(now - self._began, 1),
            train_wall_s=round(train_s, 1),
            tokens_generated=tokens.generated,
            tokens_trained=tokens.trained,
            staleness_mean=round(stale / trained, 4) if trained else 0.0,
            staleness_max=int(max((values.get("staleness/max", 0.0) for values in steps), default=0)),
            accounts_hold=counts.holds(),
            accounts=identity(tokens),
            weights_pause_ms_p50=round(statistics.median(self._pauses), 1) if self._pauses else None,
            mismatch_kl_k3=statistics.fmean(mismatch) if mismatch else None,
            restarts=restarts,
            busy=Busy(
                engine=round(min(1.0, self._generating / train_s / self._config.engine.rollouters), 3)
                if train_s
                else 0.0,
                learner=round(min(1.0, learning / train_s), 3) if train_s else 0.0,
            ),
            tools=[_tool(use) for use in together(each for beat in self._beats.values() for each in beat.tools)],
            trajectories=str(self._run_dir.journal),
            wandb=str(self._run_dir.wandb) if self._config.observe.wandb != "off" else "off",
        )

    def _pass_rate(self, version: int) -> float | None:
        for result in self._status.heldout if self._status else []:
            if result.version == version and result.ended >= result.tasks:
                return round(result.passed / result.tasks, 4)
        return None


def _tool(use: ToolUse) -> ToolSummary:
    p50, p99 = ((round(1e3 * use.quantile(share), 3) if use.seconds else None) for share in (0.5, 0.99))
    return ToolSummary(use.name, use.calls, use.errors, p50, p99)


def grown(readings: list[float]) -> float:
    """How much a total grew; a process that was started again began with zero."""
    return sum(now - last if now >= last else now for last, now in pairwise(readings))


def heldout_lines(status: Status) -> list[str]:
    return [
        f"version {result.version}: {result.passed / result.ended:.1%} of {result.ended}"
        for result in status.heldout
        if result.ended
    ]


def identity(tokens: Accounts) -> str:
    """The accounting identity, with its numbers."""
    parts = {
        "trained": tokens.trained,
        "stale": tokens.masked_stale,
        "mismatch": tokens.masked_mismatch,
        "zero signal": tokens.zero_signal,
        "discarded": tokens.discarded_stale,
        **{f"failed ({outcome})": count for outcome, count in tokens.failed.items()},
        "in flight": tokens.in_flight,
    }
    shown = " + ".join(f"{count:,} {name}" for name, count in parts.items() if count) or "0"
    return f"{tokens.generated:,} tokens {'=' if tokens.holds() else '!='} {shown}"
