"""Small rewards that shape how an answer is given. All are 0 at best, and go down from there.

Invariant: lengths are counted in sampled tokens. What a tool said, or the template, costs the policy nothing.
"""

from itertools import compress

from slipstream.errors import UserError
from slipstream.rewards.reward import Reward, reward
from slipstream.trajectory import Outcome, Trajectory


def overlong(max_tokens: int, buffer: int, *, weight: float = 1.0) -> Reward:
    """From 0 at `max_tokens - buffer` sampled tokens down to -1 at `max_tokens` (DAPO 2025)."""
    if not 0 < buffer <= max_tokens:
        raise UserError(f"overlong(max_tokens={max_tokens}, buffer={buffer}): buffer must be from 1 to max_tokens")

    def overlong(trajectory: Trajectory) -> float:
        over = sum(trajectory.sampled) - (max_tokens - buffer)
        return -min(max(over / buffer, 0.0), 1.0)

    return reward(overlong, weight=weight)


def unfinished(*, weight: float = 1.0) -> Reward:
    """-1 when the last turn was cut before its stop token."""

    def unfinished(trajectory: Trajectory) -> float:
        return -1.0 if trajectory.outcome is Outcome.TRUNCATED_TOKENS else 0.0

    return reward(unfinished, weight=weight)


def repetition(length: int = 20, *, weight: float = 1.0) -> Reward:
    """Minus the share of runs of `length` sampled tokens that were there before."""
    if length < 1:
        raise UserError(f"repetition({length}): write a length of at least 1")

    def repetition(trajectory: Trajectory) -> float:
        tokens = list(compress(trajectory.token_ids, trajectory.sampled))
        runs = [tuple(tokens[at : at + length]) for at in range(len(tokens) - length + 1)]
        return -(1.0 - len(set(runs)) / len(runs)) if runs else 0.0

    return reward(repetition, weight=weight)
