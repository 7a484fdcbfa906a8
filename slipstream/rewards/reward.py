"""`@reward`: a function that scores a finished trajectory.

Invariant: a score is a finite number, or there is none. A reward that raises, hangs or returns NaN fails by name; it
never becomes 0.
"""

import inspect
import math
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from slipstream.errors import UserError
from slipstream.task import Task
from slipstream.trajectory import Trajectory
from slipstream.usercall import OutOfTime, TooManyStuck, UserCalls


class RewardFailed(Exception):
    """Names the reward and holds the traceback."""


class Evidence(msgspec.Struct, kw_only=True):
    """What a reward may ask for, by parameter name."""

    answer: str  # text of the last assistant turn
    task: Task
    messages: list[dict[str, Any]]
    trajectory: Trajectory


class Score(msgspec.Struct, frozen=True):
    """The weighted sum of the parts, by reward name. None: no reward gave a number."""

    total: float | None
    parts: dict[str, float]


class Reward:
    """A scoring function with the names of what it wants to see."""

    def __init__(self, function: Callable[..., Any], weight: float) -> None:
        if not inspect.isroutine(function):
            raise UserError(f"@reward needs a function with a name, not {function!r}: wrap it in a def")
        self.name: str = function.__name__
        self.function = function
        if not math.isfinite(weight):
            raise UserError(f"reward {self.name}: weight = {weight}; write a finite number")
        self.weight = weight
        known = Evidence.__struct_fields__
        self.wants: list[str] = []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name in known and parameter.kind is not parameter.POSITIONAL_ONLY:
                self.wants.append(parameter.name)
            elif parameter.default is parameter.empty:
                raise UserError(f"reward {self.name} asks for {parameter}; it may ask for {', '.join(known)}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def reward(function: Callable[..., Any] | None = None, *, weight: float = 1.0) -> Any:
    """Make a reward of a function whose parameters are any of `answer`, `task`, `messages`, `trajectory`.

    >>> @reward
    ... def short(answer: str) -> bool:
    ...     return len(answer) < 100
    """

    def make(wrapped: Callable[..., Any]) -> Reward:
        return Reward(wrapped, weight)

    return make if function is None else make(function)


async def score(rewards: Sequence[Reward], evidence: Evidence, seconds: float, calls: UserCalls) -> Score:
    """Run every reward, all of them within `seconds`. Raises RewardFailed."""
    parts: dict[str, float] = {}
    deadline = time.monotonic() + seconds
    for each in rewards:
        value = await _one(each, evidence, max(0.0, deadline - time.monotonic()), calls)
        if value is not None:
            parts[each.name] = value
    weights = {each.name: each.weight for each in rewards}
    total = sum(weights[name] * value for name, value in parts.items()) if parts else None
    return Score(total, parts)


async def _one(each: Reward, evidence: Evidence, seconds: float, calls: UserCalls) -> float | None:
    arguments = {name: getattr(evidence, name) for name in each.wants}
    try:
        value = await calls.call(each.function, arguments, seconds)
        if value is None:
            return None
        if isinstance(value, str):  # float() would take "1"
            raise TypeError(f"it returned the text {value!r}")
        number = float(value)
    except (OutOfTime, TooManyStuck) as error:
        raise RewardFailed(f"reward {each.name} did not end in time {error}") from error
    except Exception as error:
        raise RewardFailed(f"reward {each.name} raised:\n{traceback.format_exc()}") from error
    if not math.isfinite(number):
        raise RewardFailed(f"reward {each.name} returned {value}; a reward is a finite number, or None for no score")
    return number
