"""What a run's metrics say of its health, as plain sentences: when staleness hurts, and which correction to try.

Invariant: every sentence names the number that it is about, its threshold, and a key of the config to turn. Nothing is
said of what was not measured. The thresholds are rules of thumb, not results; docs/advisor.md says so.
"""

from collections.abc import Sequence

import msgspec

from slipstream.config import Config

RECENT = 20  # steps

ESS = 0.5  # is/ess under this: a few tokens carry the whole step
MISMATCH = 1e-2  # mismatch/kl_k3 over this: the learner does not see what the engine sampled from
MASKED = 0.1  # is/masked_fraction, and share of tokens over the cutoff
CLIPPED = 0.2  # loss/clip_fraction over this: the step goes further than the clip
ZERO_SIGNAL = 0.5  # groups without signal, of those taken
FAILED = 0.05  # tokens of failed trajectories, of those generated


class Advice(msgspec.Struct, frozen=True):
    """`key` = `value` is what to set; "" where there is nothing to set."""

    says: str
    key: str = ""
    value: str = ""

    @property
    def sentence(self) -> str:
        """`says` with a point at its end and, unless it begins with a name, a capital at its start."""
        said = self.says if self.says.endswith(".") else f"{self.says}."
        is_name = any(mark in said.split()[0] for mark in "./")
        return said if is_name else f"{said[0].upper()}{said[1:]}"


def health(config: Config, metrics: Sequence[dict[str, float]]) -> list[Advice]:
    """Of the last steps. Empty: nothing that is measured is beyond its threshold."""
    steps = _Recent(metrics)
    found = [
        _mismatch(config, steps),
        _ess(config, steps),
        _masked(steps),
        _stale(config, steps),
        _clipped(config, steps),
        _signal(config, steps),
        _failed(steps),
    ]
    return [advice for advice in found if advice is not None]


class _Recent:
    """The last steps of metrics.jsonl."""

    def __init__(self, metrics: Sequence[dict[str, float]]) -> None:
        self._steps = metrics[-RECENT:]
        self._before = metrics[-RECENT - 1] if len(metrics) > RECENT else {}

    def mean(self, name: str) -> float | None:
        values = [step[name] for step in self._steps if name in step]
        return sum(values) / len(values) if values else None

    def gained(self, name: str) -> float:
        """Of a counter."""
        return self._steps[-1].get(name, 0.0) - self._before.get(name, 0.0) if self._steps else 0.0

    def share(self, part: str, whole: str) -> float:
        return self.gained(part) / max(1.0, self.gained(whole))


def _mismatch(config: Config, steps: _Recent) -> Advice | None:
    """Engine and learner disagree even where nothing is stale, or because of what is."""
    kl, age = steps.mean("mismatch/kl_k3"), steps.mean("staleness/mean") or 0.0
    if kl is None or kl <= MISMATCH:
        return None
    says = f"mismatch/kl_k3 is {kl:.2g}, over {MISMATCH:g}"
    if age < 0.5:
        return Advice(
            f"{says}, at a mean staleness of only {age:.2f}: engine and learner compute different probabilities for "
            "the same weights; make model.dtype float32, or filter with the preset icepop",
            "model.dtype",
            "float32",
        )
    if "icepop" in config.correction.presets:
        return Advice(
            f"{says}, at a mean staleness of {age:.2f}, with icepop filtering it: the policy moves far in the "
            "versions that tokens are old; a lower learner.lr or staleness.depth brings it down",
            "learner.lr",
            f"{config.learner.lr / 2:g}",
        )
    return Advice(
        f"{says}, at a mean staleness of {age:.2f}: add the preset icepop, which leaves out tokens whose ratio is far "
        "from 1",
        "correction.presets",
        str([*config.correction.presets, "icepop"]),
    )


def _ess(config: Config, steps: _Recent) -> Advice | None:
    ess = steps.mean("is/ess")
    if ess is None or ess >= ESS:
        return None
    says = f"is/ess is {ess:.2f}, under {ESS:g}: few tokens carry the step, and its variance grows"
    if not any(name.startswith("tis") for name in config.correction.presets):
        return Advice(
            f"{says}; truncate the weights with the preset tis",
            "correction.presets",
            str(["tis", *config.correction.presets]),
        )
    if not config.learner.ess_lr:
        return Advice(f"{says}; scale the learning rate by it", "learner.ess_lr", "true")
    lower = max(1, config.staleness.cutoff // 2)
    return Advice(f"{says}; lower the cutoff, then the depth", "staleness.cutoff", str(lower))


def _masked(steps: _Recent) -> Advice | None:
    masked = steps.mean("is/masked_fraction")
    if masked is None or masked <= MASKED:
        return None
    return Advice(
        f"is/masked_fraction is {masked:.1%}, over {MASKED:.0%}: mask rules cut that much; tokens "
        "are too old or engine and learner differ, so lower staleness.depth before the rules' bounds are widened",
        "staleness.depth",
    )


def _stale(config: Config, steps: _Recent) -> Advice | None:
    lost = steps.gained("tokens/masked_stale") + steps.gained("tokens/discarded_stale")
    share = lost / max(1.0, steps.gained("tokens/generated"))
    if share <= MASKED:
        return None
    return Advice(
        f"{share:.1%} of the generated tokens are over staleness.cutoff = {config.staleness.cutoff}, more than "
        f"{MASKED:.0%}, and they are always those of the longest trajectories: raise the cutoff, or lower the depth",
        "staleness.cutoff",
        str(2 * max(1, config.staleness.cutoff)),
    )


def _clipped(config: Config, steps: _Recent) -> Advice | None:
    clipped, age = steps.mean("loss/clip_fraction"), steps.mean("staleness/mean") or 0.0
    if clipped is None or clipped <= CLIPPED:
        return None
    anchor = "; anchor the clip at the learner's own probabilities" if config.learner.proximal == "bypass" else ""
    key, value = ("learner.proximal", "recompute") if anchor else ("learner.lr", f"{config.learner.lr / 2:g}")
    return Advice(
        f"loss/clip_fraction is {clipped:.1%}, over {CLIPPED:.0%}, at a mean staleness of {age:.2f}{anchor}", key, value
    )


def _signal(config: Config, steps: _Recent) -> Advice | None:
    taken, zero = steps.mean("groups/taken"), steps.mean("groups/zero_signal")
    if not taken or zero is None or zero / taken <= ZERO_SIGNAL:
        return None
    rate = steps.mean("groups/pass_rate") or 0.0
    kind = "easy" if rate > 0.5 else "hard"
    return Advice(
        f"{zero / taken:.0%} of the groups have equal rewards (pass rate {rate:.0%}) and were made for nothing: the "
        f"tasks are too {kind}, or the groups too small",
        "rollout.group",
        str(2 * config.rollout.group),
    )


def _failed(steps: _Recent) -> Advice | None:
    share = steps.share("tokens/failed", "tokens/generated")
    if share <= FAILED:
        return None
    return Advice(f"{share:.1%} of the generated tokens are of trajectories that failed; logs/ says of what")
