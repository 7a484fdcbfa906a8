"""A replay beside the run it replays: a line a version while it goes on, then what came of it.

Invariant: numbers before the slash are the run's own, those after it the replay's; with JSON there is one object, and
nothing else.
"""

from typing import IO

import msgspec

from slipstream.learner.replay import Numbers, Replay, Step, Verdict

COLUMNS = (("loss", "loss"), ("ess", "ESS"), ("clip_fraction", "clipped"), ("grad_norm", "grad"), ("mismatch", "kl k3"))
WIDTH = 22


class Whole(msgspec.Struct):
    """What `--json` prints."""

    identical: bool
    verdict: Verdict
    before: Numbers  # means over the versions
    now: Numbers
    versions: list[Step]


def show(replay: Replay, out: IO[str], *, as_json: bool) -> Verdict:
    steps: list[Step] = []
    if not as_json:
        out.write(f"recorded / replayed\n{'version':>8}")
        out.write("".join(f"{title:>{WIDTH}}" for _, title in COLUMNS) + "  checksum\n")
    for step in replay:
        steps.append(step)
        if not as_json:
            said = "same" if step.recorded == step.replayed else "differs"
            out.write(f"{step.version:>8}{_row(step.before, step.now)}  {said}\n")
            out.flush()
    verdict = replay.verdict()
    before, now = mean([step.before for step in steps]), mean([step.now for step in steps])
    if as_json:
        whole = Whole(verdict.identical, verdict, before, now, steps)
        out.write(msgspec.json.encode(whole).decode() + "\n")
    else:
        out.write(f"{'mean':>8}{_row(before, now)}\n{sentence(verdict, steps)}\n")
    out.flush()
    return verdict


def sentence(verdict: Verdict, steps: list[Step]) -> str:
    lines: list[str] = []
    if verdict.made_twice:
        named = ", ".join(map(str, verdict.made_twice))
        lines.append(f"the run itself published version {named} twice, and not the same")
    recorded = f"versions 0 to {verdict.versions} have the checksums that were published"
    if verdict.first_difference is None:
        lines.append(f"identical: {recorded}")
    elif verdict.changed:
        lines.append(f"with {', '.join(verdict.changed)} it differs from version {verdict.first_difference} on")
    else:
        lines.append(
            f"DIFFERS: version {verdict.first_difference} is the first that is not what was published; another "
            "processor, number of threads or release of torch can do that"
        )
    if empty := [step.version for step in steps if not step.groups]:
        lines.append(
            f"{len(empty)} versions without a step, the first is {empty[0]}: the change drops all their groups"
        )
    return "\n".join(lines)


def mean(rows: list[Numbers]) -> Numbers:
    """Of what is known."""

    def of(name: str) -> float | None:
        known: list[float] = [value for row in rows if (value := getattr(row, name)) is not None]
        return sum(known) / len(known) if known else None

    return Numbers(*(of(name) for name, _ in COLUMNS))


def _row(before: Numbers, now: Numbers) -> str:
    return "".join(
        f"{f'{_number(getattr(before, name))} / {_number(getattr(now, name))}':>{WIDTH}}" for name, _ in COLUMNS
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
