"""Which charts there are: from a run's history to figures.

Invariant: every chart is made of what `History` read; nothing is smoothed but by the spans of `Steps`.
"""

from collections.abc import Sequence

from slipstream.report import attempts
from slipstream.report.figure import Chart, Figure, Heat, Section, Series, Values, few_ticks
from slipstream.report.history import History, Steps, Told

FATES = {
    "trained": "tokens/trained",
    "over the cutoff": "tokens/masked_stale",
    "mismatch": "tokens/masked_mismatch",
    "no signal": "tokens/zero_signal",
    "discarded, too old": "tokens/discarded_stale",
    "failed": "tokens/failed",
}
TOOL_CHARTS = (  # metric, title, what it is
    ("calls", "Calls", "calls since the last point, of the rollouters that are there"),
    ("errors", "Calls in vain", "of those: refused, failed or timed out"),
    ("p50_s", "Median time", "seconds of a call"),
    ("p99_s", "Slowest calls", "seconds; 99th percentile"),
)
OLDEST = 12  # rows of the staleness histogram; what is older is in the last


def sections(history: History) -> list[Section]:
    steps, told = Steps(history.metrics), history.trained
    learning = [_reward(steps), _heldout(history), _rewards(steps), _loss(steps), _gradient(steps)]
    times = [_time(steps, "learner", "the learner"), _time(steps, "rollouter", "all rollouters"), _pace(steps)]
    of_each = (attempts.lengths, attempts.latencies, attempts.turns, attempts.tools, attempts.outcomes)
    return [
        Section("Learning", learning),
        Section("Staleness", [_staleness(steps), _ages(steps, told), _mismatch(steps), _weights(steps)]),
        Section("Where the time went", [*times, _pauses(steps)]),
        Section("Tokens and the queue", [_fates(steps), _queue(steps), _groups(steps)]),
        Section("Trajectories", [*(chart(told) for chart in of_each), _failures(steps)]),
        Section("Tools", [_tool(steps, *each) for each in TOOL_CHARTS]),
    ]


def _over_steps(
    steps: Steps,
    key: str,
    title: str,
    says: str,
    series: Sequence[tuple[str, Values]],
    *,
    kind: str = "line",
    share: bool = False,
    empty: str = "no step was made yet",
) -> Figure:
    return Figure(
        key=key,
        title=title,
        says=says,
        kind="stack" if kind == "stack" else "line",
        xs=steps.labels,
        ticks=few_ticks(steps.labels),
        x="step",
        share=share,
        empty=empty,
        series=[Series(name, ys, number) for number, (name, ys) in enumerate(series)],
    )


# -- learning ------------------------------------------------------------------------------------------------------


def _reward(steps: Steps) -> Chart:
    return _over_steps(
        steps,
        "reward",
        "Reward and pass rate",
        "of the groups taken for a step, before dynamic sampling",
        [("reward", steps.mean("reward/mean")), ("pass rate", steps.mean("groups/pass_rate"))],
    )


def _heldout(history: History) -> Chart:
    passed: dict[int, list[bool]] = {}
    for told in history.told:
        version = told.attempt.evaluated
        if version is not None and told.story.verdict != "retry":
            passed.setdefault(version, []).append((told.attempt.reward or 0.0) >= 1)
    labels = [str(version) for version in sorted(passed)]
    return Figure(
        key="heldout",
        title="Held-out pass rate",
        says="share of held-out tasks with a reward of 1 or more",
        kind="bars",
        xs=labels,
        ticks=few_ticks(labels, 12),
        x="version",
        share=True,
        series=[Series("pass rate", [sum(each) / len(each) for _, each in sorted(passed.items())])],
        empty="no evaluation yet; tasks.heldout and rollout.evaluate_every ask for some",
    )


def _rewards(steps: Steps) -> Chart:
    names = sorted(name for name in steps.names if name.startswith("reward/") and name != "reward/mean")
    return _over_steps(
        steps,
        "rewards",
        "Reward functions",
        "mean of each one's values, before their weights",
        [(name.removeprefix("reward/"), steps.mean(name)) for name in names],
    )


def _loss(steps: Steps) -> Chart:
    return _over_steps(
        steps,
        "loss",
        "Entropy and clipped tokens",
        "nats a token; share of tokens on the flat side of the clip",
        [("entropy", steps.mean("loss/entropy")), ("clipped", steps.mean("loss/clip_fraction"))],
    )


def _gradient(steps: Steps) -> Chart:
    return _over_steps(
        steps,
        "gradient",
        "Gradient norm",
        "before clipping; its largest in the span of a point",
        [("mean", steps.mean("grad/norm")), ("largest", steps.most("grad/norm"))],
    )


# -- staleness -----------------------------------------------------------------------------------------------------


def _staleness(steps: Steps) -> Chart:
    return _over_steps(
        steps,
        "staleness",
        "Staleness of trained tokens",
        "versions between sampling and training",
        [
            ("mean", steps.mean("staleness/mean")),
            ("99%", steps.mean("staleness/p99")),
            ("oldest", steps.most("staleness/max")),
        ],
    )


def _ages(steps: Steps, told: Sequence[Told]) -> Chart:
    """Sampled tokens of all consumed trajectories, masked ones included, by age at their step."""
    counts: list[dict[int, int]] = [{} for _ in steps.last]
    for each in told:
        story = each.story
        span = steps.span_of(story.step) if story.step is not None else None
        if span is None or story.judged is None:
            continue
        for version, tokens in each.attempt.by_version:
            age = min(max(0, story.judged - version), OLDEST)
            counts[span][age] = counts[span].get(age, 0) + tokens
    oldest = max((age for column in counts for age in column), default=0)
    totals = [max(1, sum(column.values())) for column in counts]
    return Heat(
        key="ages",
        title="Staleness histogram over time",
        says="versions; the darker, the more of a step's sampled tokens (masked ones included)",
        x="step",
        xs=steps.labels,
        ticks=few_ticks(steps.labels),
        rows=[f"{age}+" if age == OLDEST else str(age) for age in range(oldest + 1)],
        cells=[
            [column.get(age, 0) / total for column, total in zip(counts, totals, strict=True)]
            for age in range(oldest + 1)
        ],
        empty="no trajectory was trained on yet, or queue.keep let them go",
    )


def _mismatch(steps: Steps) -> Chart:
    return _over_steps(
        steps,
        "mismatch",
        "Mismatch",
        "divergence of the learner's from the engine's probabilities, k3 estimator",
        [("kl_k3", steps.mean("mismatch/kl_k3"))],
    )


def _weights(steps: Steps) -> Chart:
    return _over_steps(
        steps,
        "ess",
        "Effective sample size",
        "of the correction's weights, as a share of the tokens; and what it cuts",
        [
            ("ESS", steps.mean("is/ess")),
            ("truncated", steps.mean("is/clipped_fraction")),
            ("masked", steps.mean("is/masked_fraction")),
        ],
        share=True,
    )


# -- time ----------------------------------------------------------------------------------------------------------


def _time(steps: Steps, role: str, who: str) -> Chart:
    """Shares of wall time by part; the parts of a clock sum to all of it."""
    prefix = f"time/{role}/"
    grown = {name: steps.grown(name) for name in steps.names if name.startswith(prefix)}
    totals = [sum(column) or 1.0 for column in zip(*grown.values(), strict=True)]
    names = sorted(grown, key=lambda name: (name.endswith(_BUBBLES), -sum(grown[name])))
    shares = [
        (n.removeprefix(prefix).replace("_", " "), [v / t for v, t in zip(grown[n], totals, strict=True)])
        for n in names
    ]
    return _over_steps(
        steps,
        f"time-{role}",
        f"Time of the {role}" + ("s" if role == "rollouter" else ""),
        f"wall time of {who} by what it was spent on; waiting is drawn last, on top",
        [(name, list(ys)) for name, ys in shares],
        kind="stack",
        share=True,
    )


_BUBBLES = ("waiting_for_data", "no_lease", "paused_for_weights", "idle", "other")


def _pace(steps: Steps) -> Chart:
    return _over_steps(
        steps,
        "throughput",
        "Throughput",
        "sampled tokens a second",
        [("generated", steps.mean("throughput/generated_tok_s")), ("trained", steps.mean("throughput/trained_tok_s"))],
    )


def _pauses(steps: Steps) -> Chart:
    return _over_steps(
        steps,
        "pauses",
        "Weights",
        "seconds to publish a version, and that generation stood still for it",
        [("publish", steps.mean("weights/publish_s")), ("pause", steps.mean("weights/pause_s"))],
    )


# -- tokens and the queue ------------------------------------------------------------------------------------------


def _fates(steps: Steps) -> Chart:
    grown = [(name, list(steps.grown(metric))) for name, metric in FATES.items()]
    return _over_steps(
        steps,
        "fates",
        "What became of the tokens",
        "sampled tokens settled in a step, by fate",
        [(name, [*ys]) for name, ys in grown if sum(ys) or name == "trained"],
        kind="stack",
    )


def _queue(steps: Steps) -> Chart:
    return _over_steps(
        steps,
        "queue",
        "Queue depth",
        "at the moment of a step",
        [
            ("trajectories delivered, not settled", steps.mean("queue/trajectories")),
            ("leases running", steps.mean("queue/leases")),
            ("groups ready", steps.mean("queue/groups_ready")),
        ],
    )


def _groups(steps: Steps) -> Chart:
    return _over_steps(
        steps,
        "groups",
        "Groups taken for a step",
        "those of equal rewards, or all stale, are dropped",
        [
            ("taken", steps.mean("groups/taken")),
            ("equal rewards", steps.mean("groups/zero_signal")),
            ("all stale", steps.mean("groups/discarded_stale")),
        ],
    )


def _failures(steps: Steps) -> Chart:
    names = sorted(name for name in steps.names if name.startswith("outcome/") and name != "outcome/finished")
    return _over_steps(
        steps,
        "failures",
        "Failures by type",
        "trajectories taken for a step that did not finish, mean of a point's span",
        [(name.removeprefix("outcome/").replace("_", " "), steps.mean(name)) for name in names],
        empty="no trajectory failed",
    )


def _tool(steps: Steps, metric: str, title: str, says: str) -> Chart:
    """By tool."""
    tools = sorted(name.split("/")[1] for name in steps.names if name.startswith("tool/") and name.endswith("/calls"))
    values = steps.mean if metric.endswith("_s") else steps.grown
    series = [(tool, list(values(f"tool/{tool}/{metric}"))) for tool in tools]
    return _over_steps(steps, f"tool-{metric}", title, says, series, empty="no tool was called yet")
