"""A step as metrics and as one line. Names are those of the contract.

Invariant: what is not finite is left out (JSON has neither inf nor NaN; `grad/skipped` says that it happened). Rewards,
lengths and outcomes are of every group taken since the last step, those without signal included.
"""

import math
from collections import Counter
from collections.abc import Sequence

from slipstream.learner.groups import Seen
from slipstream.learner.step import StepStats
from slipstream.observe.clock import Clock
from slipstream.queue.client import LearnerClient
from slipstream.queue.messages import Status, StepPace
from slipstream.tooluse import together


class Report:
    """Joins what a step did with what the queue says of everybody else."""

    def __init__(self, client: LearnerClient, clock: Clock) -> None:
        self._client, self._clock = client, clock
        self._wall = 0.0
        self._paced: tuple[float, float] | None = None  # seconds in all and for data, at the last step
        self._generated = client.status().tokens.generated

    def pace(self, stats: StepStats) -> StepPace | None:
        """Since the last call. None of the first step, which waited for engines to start."""
        parts = self._clock.reading().parts
        wall, waiting = sum(parts.values()), parts.get("waiting for data", 0.0)
        before, self._paced = self._paced, (wall, waiting)
        if before is None:
            return None
        waited = (waiting - before[1]) / max(1e-9, wall - before[0])
        return StepPace(waited=waited, ess=stats.ess if math.isfinite(stats.ess) else None)

    def values(self, stats: StepStats, seen: list[Seen], dropped: "Counter[str]", publish_s: float) -> dict[str, float]:
        status = self._client.status()
        values = {
            **_step_values(stats, publish_s),
            **_group_values(seen, dropped),
            **_status_values(status),
            **self._times(status, stats),
        }
        return {name: value for name, value in values.items() if math.isfinite(value)}

    def _times(self, status: Status, stats: StepStats) -> dict[str, float]:
        reading = self._clock.reading()
        values = {f"time/learner/{_key(part)}": seconds for part, seconds in reading.parts.items()}
        for beat in status.rollouters:
            for part, seconds in beat.clock.parts.items():
                name = f"time/rollouter/{_key(part)}"
                values[name] = values.get(name, 0.0) + seconds
        wall = sum(reading.parts.values())
        seconds = max(1e-9, wall - self._wall)
        values["throughput/trained_tok_s"] = stats.trained / seconds
        values["throughput/generated_tok_s"] = (status.tokens.generated - self._generated) / seconds
        self._wall, self._generated = wall, status.tokens.generated
        return values

    @staticmethod
    def line(step: int, steps: int, stats: StepStats, values: dict[str, float]) -> str:
        return (
            f"step {step}/{steps}  reward {values['reward/mean']:.3f}  loss {stats.loss:+.4f}  "
            f"grad {stats.grad_norm:.2f}  stale {stats.staleness_mean:.2f}/{stats.staleness_max}  ess {stats.ess:.3f}  "
            f"kl {stats.kl_k3:.1e}  {stats.trained} tokens  {stats.seconds:.1f} s"
        )


def waiting_line(found: int, size: int, seconds: float, dropped: "Counter[str]", seen: list[Seen], why: str) -> str:
    """What the learner says while there is no batch: how far it is, what was dropped, what the queue waits for."""
    line = f"waiting for data for {seconds:.0f} s: {found} of {size} groups"
    if dropped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        rate = _mean([group.pass_rate() for group in seen])
        line += f"; dropped {reasons}; pass rate {rate:.2f}"
        if dropped["zero_signal"] > found:
            line += f": tasks are too {'easy' if rate > 0.5 else 'hard'}, or raise rollout.group"
    return f"{line}; {why}" if why else line


def _step_values(stats: StepStats, publish_s: float) -> dict[str, float]:
    return {
        "loss/policy": stats.loss,
        "loss/kl": stats.kl,
        "loss/entropy": stats.entropy,
        "loss/clip_fraction": stats.clip_fraction,
        "grad/norm": stats.grad_norm,
        "grad/skipped": float(stats.skipped),
        "lr": stats.lr,
        "is/ess": stats.ess,
        "is/weight_mean": stats.weight_mean,
        "is/clipped_fraction": stats.clipped_fraction,
        "is/masked_fraction": stats.masked_fraction,
        "mismatch/kl_k1": stats.kl_k1,
        "mismatch/kl_k3": stats.kl_k3,
        "mismatch/max_prob_diff": stats.max_prob_diff,
        "staleness/mean": stats.staleness_mean,
        "staleness/p99": stats.staleness_p99,
        "staleness/max": float(stats.staleness_max),
        "step/hidden_fraction": stats.hidden,
        "tokens/step": float(stats.tokens),
        "tokens/step_trained": float(stats.trained),
        "weights/publish_s": publish_s,
    }


def _group_values(seen: list[Seen], dropped: "Counter[str]") -> dict[str, float]:
    lengths = [length for group in seen for length in group.lengths]
    parts: dict[str, list[float]] = {}
    for group in seen:
        for name, values in group.parts.items():
            parts.setdefault(name, []).extend(values)
    outcomes = Counter(outcome for group in seen for outcome in group.outcomes)
    return {
        "reward/mean": _mean([reward for group in seen for reward in group.rewards]),
        "groups/taken": float(len(seen)),
        "groups/zero_signal": float(dropped["zero_signal"]),
        "groups/discarded_stale": float(dropped["discarded_stale"]),
        "groups/pass_rate": _mean([group.pass_rate() for group in seen]),
        "turns/mean": _mean([turns for group in seen for turns in group.turns]),
        "length/mean": _mean(lengths),
        "length/max": float(max(lengths)),
        **{f"reward/{name}": _mean(values) for name, values in parts.items()},
        **{f"outcome/{name}": float(count) for name, count in outcomes.items()},
    }


def _status_values(status: Status) -> dict[str, float]:
    tokens = status.tokens
    pauses = [pause for beat in status.rollouters for pause in beat.pause_ms]
    values = {
        "tokens/generated": float(tokens.generated),
        "tokens/trained": float(tokens.trained),
        "tokens/masked_stale": float(tokens.masked_stale),
        "tokens/masked_mismatch": float(tokens.masked_mismatch),
        "tokens/zero_signal": float(tokens.zero_signal),
        "tokens/discarded_stale": float(tokens.discarded_stale),
        "tokens/failed": float(sum(tokens.failed.values())),
        "tokens/in_flight": float(tokens.in_flight),
        "staleness/depth": status.depth,
        "queue/trajectories": float(status.trajectories.in_flight),
        "queue/bytes": float(status.bytes_held),
        "queue/leases": float(status.leases.running),
        "queue/groups_ready": float(status.groups_ready),
        "weights/version": float(status.version),
    }
    for use in together(each for beat in status.rollouters for each in beat.tools):
        values[f"tool/{use.name}/calls"] = float(use.calls)
        values[f"tool/{use.name}/errors"] = float(use.errors)
        values[f"tool/{use.name}/p50_s"] = use.quantile(0.5)
        values[f"tool/{use.name}/p99_s"] = use.quantile(0.99)
    if pauses:
        values["weights/pause_s"] = _mean(pauses) / 1e3
    return values


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _key(part: str) -> str:
    return part.replace(" ", "_").replace("/", "_")
