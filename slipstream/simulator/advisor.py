"""What to set in a run's config, and what it would give: the run's own measurements, tried out on the virtual clock.

Invariant: every setting that is advised was simulated, and so was the present one: what is promised is the ratio of
two simulations, and beside the present one stands what the run really did.
"""

import math
from collections.abc import Sequence

import msgspec

from slipstream.config import RunDir
from slipstream.observe.advise import Advice, health
from slipstream.simulator.measurements import Measured, measured
from slipstream.simulator.picture import Line, Lines, picture
from slipstream.simulator.scenario import Scenario
from slipstream.simulator.tally import Result
from slipstream.simulator.world import simulate

DEPTHS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
GROWTH = (1, 2, 3, 4, 6, 8)  # times the rollouters
GAIN = 0.03  # less of a step's time than this is no gain
LOST = 0.01  # share of tokens that a good cutoff may lose
OPEN = 10**6  # a cutoff that cuts nothing


class Point(msgspec.Struct, frozen=True):
    """One setting, simulated."""

    setting: float
    batch_s: float
    steps_per_hour: float
    staleness_mean: float  # of trained tokens
    staleness_p99: float
    learner_busy: float
    rollouter_busy: float


class Advised(msgspec.Struct, kw_only=True, frozen=True):
    depth: float
    cutoff: int
    rollouters: int
    concurrency: int
    batch_s: float  # with all of these
    speedup: float  # against the present settings
    staleness_mean: float


class Report(msgspec.Struct, kw_only=True, frozen=True):
    steps: int  # that were measured
    real: Point  # what the run did
    simulated: Point  # the same settings, on the virtual clock
    by_depth: list[Point]
    by_rollouters: list[Point]
    by_concurrency: list[Point]
    advised: Advised
    sentences: list[Advice]
    notes: list[str]


def advise(run_dir: RunDir) -> Report:
    run = measured(run_dir)
    now = simulate(run.scenario)
    return _Advisor(run, now).report()


class _Advisor:
    def __init__(self, run: Measured, now: Result) -> None:
        self._run, self._now, self._start = run, now, run.scenario

    def report(self) -> Report:
        start, present = self._start, _point(self._start.set_depth, self._now)
        by_depth = self._try("depth", sorted({*DEPTHS, start.set_depth}))
        depth = _least(by_depth)
        at_depth = msgspec.structs.replace(start, depth=depth.setting)
        by_rollouters = self._grow(at_depth)
        rollouters = _least(by_rollouters)
        slots = sorted({max(1, start.concurrency // 2), start.concurrency, 2 * start.concurrency})
        by_concurrency = self._try("concurrency", slots, at_depth)
        concurrency = self._concurrency(by_concurrency)
        best = msgspec.structs.replace(
            start, depth=depth.setting, rollouters=int(rollouters.setting), concurrency=int(concurrency.setting)
        )
        cutoff = self._cutoff(best)
        final = simulate(msgspec.structs.replace(best, cutoff=cutoff))
        advised = Advised(
            depth=depth.setting,
            cutoff=cutoff,
            rollouters=int(rollouters.setting),
            concurrency=int(concurrency.setting),
            batch_s=final.batch_s,
            speedup=self._now.batch_s / final.batch_s,
            staleness_mean=final.token_staleness_mean,
        )
        sentences = [
            self._bound(),
            self._on_depth(by_depth, depth),
            self._on_cutoff(cutoff),
            self._on_rollouters(by_rollouters, rollouters, depth.setting),
            self._on_concurrency(by_concurrency, concurrency),
            *health(self._run.config, self._run.metrics),
        ]
        return Report(
            steps=self._run.steps,
            real=Point(
                setting=start.set_depth,
                batch_s=self._run.batch_s,
                steps_per_hour=3600 / self._run.batch_s,
                staleness_mean=self._run.staleness_mean,
                staleness_p99=self._run.staleness_p99,
                learner_busy=self._run.learner_busy,
                rollouter_busy=self._run.rollouter_busy,
            ),
            simulated=present,
            by_depth=by_depth,
            by_rollouters=by_rollouters,
            by_concurrency=by_concurrency,
            advised=advised,
            sentences=sentences,
            notes=self._run.notes,
        )

    def _try(self, key: str, settings: Sequence[float], start: Scenario | None = None) -> list[Point]:
        """Each setting, without a cutoff that would hide how old tokens get."""
        base = msgspec.structs.replace(start or self._start, cutoff=OPEN)
        return [_point(value, simulate(msgspec.structs.replace(base, **{key: value}))) for value in settings]

    def _grow(self, start: Scenario) -> list[Point]:
        """More and more rollouters, until more of them gain nothing."""
        points: list[Point] = []
        for times in GROWTH:
            points += self._try("rollouters", [start.rollouters * times], start)
            if len(points) > 1 and points[-1].batch_s > (1 - GAIN) * points[-2].batch_s:
                break
        return points

    def _concurrency(self, points: list[Point]) -> Point:
        """As it is, unless it is known what a load does to an engine, and another one gains."""
        present = next(point for point in points if point.setting == self._start.concurrency)
        best = min(points, key=lambda point: point.batch_s)
        gains = self._run.pace_known and best.batch_s < (1 - GAIN) * present.batch_s
        return best if gains else present

    def _cutoff(self, scenario: Scenario) -> int:
        """Twice the depth, so that a slow minute costs nothing; more where that would lose over LOST of the tokens."""
        ages = simulate(msgspec.structs.replace(scenario, cutoff=OPEN)).staleness_tokens
        total = sum(ages.values())
        least = max(2, math.ceil(2 * scenario.set_depth))
        return next(age for age in range(least, OPEN) if self._over(ages, age) <= LOST * total)

    @staticmethod
    def _over(ages: dict[int, int], cutoff: int) -> int:
        return sum(count for age, count in ages.items() if age > cutoff)

    # -- sentences -------------------------------------------------------------------------------------------------

    def _bound(self) -> Advice:
        now, scenario = self._now, self._start
        lead = f"A step takes {self._run.batch_s:.3g} s ({now.batch_s:.3g} s simulated); "
        waits, idle = now.learner_waiting, 1 - now.rollouter_busy
        if waits < GAIN:
            return Advice(
                f"{lead}the learner is busy all the time, and rollouters have {idle:.0%} of their slots free."
            )
        if idle < 0.1:
            return Advice(f"{lead}the rollouters are full, and the learner waits for data {waits:.0%} of the time.")
        return Advice(
            f"{lead}learner and rollouters wait for each other: the learner {waits:.0%} of the time, and {idle:.0%} of "
            f"the slots are free, since staleness.depth = {scenario.set_depth:g} lets no more groups be made."
        )

    def _on_depth(self, points: list[Point], best: Point) -> Advice:
        present = next(point for point in points if point.setting == self._start.set_depth)
        if best.setting == present.setting:
            return Advice(
                f"staleness.depth = {best.setting:g} is right: less is slower, and more only makes tokens older."
            )
        what = (
            f"makes a step {present.batch_s / best.batch_s:.2f} times as fast"
            if best.setting > present.setting
            else f"is as fast (steps of {best.batch_s:.3g} s for {present.batch_s:.3g} s)"
        )
        return Advice(
            f"staleness.depth = {best.setting:g} {what}; mean staleness goes from {present.staleness_mean:.2f} to "
            f"{best.staleness_mean:.2f}. More than that gains nothing.",
            "staleness.depth",
            f"{best.setting:g}",
        )

    def _on_cutoff(self, cutoff: int) -> Advice:
        now = self._start.cutoff
        if cutoff == now:
            return Advice(f"staleness.cutoff = {cutoff} is right: it loses at most {LOST:.0%} of the tokens.")
        why = "it would lose more than that" if now < cutoff else f"{now} lets in what is older, and little of it"
        return Advice(
            f"staleness.cutoff = {cutoff} bounds the worst case and loses at most {LOST:.0%} of the tokens; {why}.",
            "staleness.cutoff",
            str(cutoff),
        )

    def _on_rollouters(self, points: list[Point], best: Point, depth: float) -> Advice:
        here, twice = points[0], points[1]
        if best.setting == here.setting:
            if 1 - here.learner_busy < GAIN:
                why = f"the learner is busy {here.learner_busy:.0%} of the time"
            elif here.rollouter_busy < 0.9:
                why = f"{1 - here.rollouter_busy:.0%} of the slots there are stay free"
            else:
                why = f"staleness.depth = {depth:g} lets no more groups be made"
            return Advice(
                f"More rollouters gain nothing: {why}. Twice as many would make a step of {twice.batch_s:.3g} s for "
                f"{here.batch_s:.3g} s."
            )
        return Advice(
            f"engine.rollouters = {best.setting:g} makes a step {here.batch_s / best.batch_s:.2f} times as fast, if "
            "each has a device of its own; more than that gains nothing.",
            "engine.rollouters",
            f"{best.setting:g}",
        )

    def _on_concurrency(self, points: list[Point], best: Point) -> Advice:
        if not self._run.pace_known:
            return Advice(
                f"What another rollout.concurrency than {best.setting:g} would do cannot be told: the engines "
                "always had about as many trajectories as now. Try it."
            )
        if best.setting == self._start.concurrency:
            return Advice(f"rollout.concurrency = {best.setting:g} is right: half or twice as much is no faster.")
        present = next(point for point in points if point.setting == self._start.concurrency)
        return Advice(
            f"rollout.concurrency = {best.setting:g} makes a step {present.batch_s / best.batch_s:.2f} times as fast.",
            "rollout.concurrency",
            f"{best.setting:g}",
        )


def _least(points: Sequence[Point]) -> Point:
    """The lowest setting that is as good as the best."""
    best = min(point.batch_s for point in points)
    return next(point for point in points if point.batch_s <= (1 + GAIN) * best)


def _point(setting: float, result: Result) -> Point:
    return Point(
        setting=setting,
        batch_s=result.batch_s,
        steps_per_hour=3600 / result.batch_s,
        staleness_mean=result.token_staleness_mean,
        staleness_p99=result.token_staleness_p99,
        learner_busy=1 - result.learner_waiting,
        rollouter_busy=result.rollouter_busy,
    )


# -- for a person ------------------------------------------------------------------------------------------------------


def text(report: Report) -> str:
    advised = report.advised
    lines = [f"- {advice.sentence}" for advice in report.sentences]
    lines += [f"  ({note})" for note in report.notes]
    lines += [
        "",
        f"All of it: depth {advised.depth:g}, cutoff {advised.cutoff}, rollouters {advised.rollouters}, concurrency "
        f"{advised.concurrency}: steps of {advised.batch_s:.3g} s, {advised.speedup:.2f} times as fast as now, mean "
        f"staleness {advised.staleness_mean:.2f}.",
        "",
        f"{'depth':>6} {'s/step':>8} {'steps/h':>8} {'staleness':>10} {'p99':>4} {'learner':>8} {'slots':>6}",
        *(_row(f"{point.setting:g}", point) for point in report.by_depth),
        _row("now", report.simulated),
        _row("real", report.real),
    ]
    return "\n".join(lines)


def _row(name: str, point: Point) -> str:
    return (
        f"{name:>6} {point.batch_s:8.3g} {point.steps_per_hour:8.0f} {point.staleness_mean:10.2f} "
        f"{point.staleness_p99:4.0f} {point.learner_busy:8.0%} {point.rollouter_busy:6.0%}"
    )


def svg(report: Report) -> str:
    depths = [point.setting for point in report.by_depth]
    rollouters = [point.setting for point in report.by_rollouters]
    return picture(
        [
            Lines(
                "Throughput",
                "steps an hour",
                "depth",
                depths,
                [Line("steps", [point.steps_per_hour for point in report.by_depth])],
                report.advised.depth,
            ),
            Lines(
                "Staleness",
                "versions",
                "depth",
                depths,
                [
                    Line("mean", [point.staleness_mean for point in report.by_depth]),
                    Line("p99", [point.staleness_p99 for point in report.by_depth]),
                ],
                report.advised.depth,
                1,
            ),
            Lines(
                "Rollouters",
                "steps an hour",
                "rollouters",
                rollouters,
                [Line("steps", [point.steps_per_hour for point in report.by_rollouters])],
                float(report.advised.rollouters),
                2,
            ),
        ]
    )
