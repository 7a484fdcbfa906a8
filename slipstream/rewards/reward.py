"""`@reward`: a function that scores a finished trajectory.

Invariant: a score is a finite number, or there is none. A reward that raises, hangs or returns NaN fails by name; it
never becomes 0.
"""

import asyncio
import functools
import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from slipstream.errors import UserError
from slipstream.task import Task
from slipstream.threads import in_daemon_thread


class RewardFailed(Exception):
    """Names the reward and holds the traceback."""


class Evidence(msgspec.Struct, kw_only=True):
    """What a reward may ask for, by parameter name."""

    answer: str  # text of the last assistant turn
    task: Task
    messages: list[dict[str, Any]]


class Score(msgspec.Struct, frozen=True):
    """The weighted sum of the parts, by reward name. None: no reward gave a number."""

    total: float | None
    parts: dict[str, float]


class Reward:
    """A scoring function with the names of what it wants to see."""

    def __init__(self, function: Callable[..., Any], weight: float) -> None:
        if isinstance(function, functools.partial) or not inspect.isroutine(function):
            raise UserError(f"@reward needs a function with a name, not {function!r}: wrap it in a def")
        self.name: str = function.__name__
        self.function = function
        self.weight = weight
        self.is_async = inspect.iscoroutinefunction(function)
        self.wants = list(inspect.signature(function).parameters)
        known = Evidence.__struct_fields__
        for name in self.wants:
            if name not in known:
                raise UserError(f"reward {self.name} asks for {name!r}; it may ask for {', '.join(known)}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def reward(function: Callable[..., Any] | None = None, *, weight: float = 1.0) -> Any:
    """Make a reward of a function whose parameters are any of `answer`, `task`, `messages`.

    >>> @reward
    ... def short(answer: str) -> bool:
    ...     return len(answer) < 100
    """
    if function is None:
        return lambda wrapped: Reward(wrapped, weight)
    return Reward(function, weight)


async def score(rewards: Sequence[Reward], evidence: Evidence, seconds: float) -> Score:
    """Run every reward, sync ones in threads. Raises RewardFailed."""
    parts: dict[str, float] = {}
    total: float | None = None
    for each in rewards:
        value = await _one(each, evidence, seconds)
        if value is not None:
            parts[each.name] = value
            total = (total or 0.0) + each.weight * value
    return Score(total, parts)


async def _one(each: Reward, evidence: Evidence, seconds: float) -> float | None:
    arguments = {name: getattr(evidence, name) for name in each.wants}
    try:
        async with asyncio.timeout(seconds):
            if each.is_async:
                value = await each.function(**arguments)
            else:
                value = await in_daemon_thread(lambda: each.function(**arguments))
        if value is None:
            return None
        value = float(value)
    except TimeoutError as error:
        raise RewardFailed(f"reward {each.name} did not end within {seconds:g} s") from error
    except Exception as error:
        raise RewardFailed(f"reward {each.name} raised:\n{traceback.format_exc()}") from error
    if not math.isfinite(value):
        raise RewardFailed(f"reward {each.name} returned {value}; a reward is a finite number, or None for no score")
    return value
