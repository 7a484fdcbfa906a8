"""A simulated run for a person: a table with bars in the terminal, or charts.

Invariant: nothing is computed here that `Result` does not hold.
"""

from slipstream.simulator.picture import Bars, picture
from slipstream.simulator.scenario import Scenario
from slipstream.simulator.tally import Result

BAR = 40  # characters of the longest bar
ROWS = 20  # of the histogram: the rest is one row


def table(result: Result) -> str:
    accounts = result.accounts
    lost = accounts.masked_stale + accounts.discarded_stale
    rows = {
        "learner": f"busy {result.learner_busy:.1%}, waits for data {result.learner_waiting:.1%}; "
        f"{result.batch_s:,.4g} s from one version to the next",
        "rollouters": f"slots in use {result.rollouter_busy:.1%}, with tools {result.rollouter_tools:.1%}; "
        f"engines paused for weights {result.rollouter_paused:.1%}",
        "tokens a second": f"{result.generated_tok_s:,.0f} generated, {result.trained_tok_s:,.0f} trained",
        "staleness": f"of trajectories mean {result.staleness_mean:.2f}, p99 {result.staleness_p99:.0f}, max "
        f"{result.staleness_max}; of tokens mean {result.token_staleness_mean:.2f}, p99 "
        f"{result.token_staleness_p99:.0f}",
        "too old": f"{result.discarded_fraction:.1%} of trajectories wholly, "
        f"{result.stale_token_fraction:.1%} of tokens",
        "length": f"trained / generated {result.length_bias:.3f}; "
        f"p50 {_at(result.length_trained, 1)} / {_at(result.length_generated, 1)}, "
        f"p99 {_at(result.length_trained, 3)} / {_at(result.length_generated, 3)} tokens",
        "tokens by fate": f"{accounts.generated:,} generated = {accounts.trained:,} trained + {lost:,} too old + "
        f"{accounts.zero_signal:,} without signal + {sum(accounts.failed.values()):,} failed + "
        f"{accounts.in_flight:,} in flight: {'holds' if result.accounts_hold else 'DOES NOT HOLD'}",
        "simulated": f"{result.batches:,} batches, {_span(result.virtual_s)}, after a warm-up; "
        f"{result.trajectories:,} trajectories in {result.wall_s:.1f} s",
    }
    lines = [f"{name:16} {said}" for name, said in rows.items()]
    return "\n".join([*lines, "", "trained tokens by staleness", *_bars(result.staleness_tokens)])


def svg(scenario: Scenario, result: Result) -> str:
    ages = list(range(max(result.staleness_tokens, default=0) + 1))
    total = max(1, sum(result.staleness_tokens.values()))
    shares = [100 * result.staleness_tokens.get(age, 0) / total for age in ages]
    busy = {
        "learner": result.learner_busy,
        "waits": result.learner_waiting,
        "slots used": result.rollouter_busy,
        "at tools": result.rollouter_tools,
        "paused": result.rollouter_paused,
    }
    lengths = {
        f"{name} {kind}": value
        for kind, values in (("made", result.length_generated), ("trained", result.length_trained))
        for name, value in zip(("p10", "p50", "p90", "p99"), values, strict=False)
    }
    title = f"Staleness at depth {result.depth:g}, cutoff {scenario.cutoff}"
    return picture(
        [
            Bars(title, "% of trained tokens, by age in versions", [str(age) for age in ages], shares),
            Bars("Busy", "% of the time", list(busy), [100 * share for share in busy.values()], 2),
            Bars("Length", "tokens", list(lengths), list(lengths.values()), 1),
        ]
    )


def _bars(counts: dict[int, int]) -> list[str]:
    shown = {str(age): counts.get(age, 0) for age in range(min(ROWS, max(counts, default=0) + 1))}
    if rest := sum(count for age, count in counts.items() if age >= ROWS):
        shown[f"{ROWS}+"] = rest
    total, most = max(1, sum(shown.values())), max(shown.values(), default=0) or 1
    return [f"{age:>5} {'█' * round(BAR * count / most):{BAR}} {count / total:6.1%}" for age, count in shown.items()]


def _at(values: list[float], index: int) -> str:
    return f"{values[index]:,.0f}" if values else "none"


def _span(seconds: float) -> str:
    for name, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {name}"
    return f"{seconds:.0f} seconds"
