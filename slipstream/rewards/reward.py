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
from slipstream.rewards.evidence import Evidence
from slipstream.rewards.foreign import for_trl, for_verl, is_trl, is_verl, of_one
from slipstream.task import Task
from slipstream.usercall import OutOfTime, TooManyStuck, UserCalls


class RewardFailed(Exception):
    """Names the reward and holds the traceback."""


class Score(msgspec.Struct, frozen=True):
    """The weighted sum of the rewards, and each by its name (with what it said besides as NAME.KEY). None: no reward
    gave a number."""

    total: float | None
    parts: dict[str, float]


class Reward:
    """A scoring function with the names of what it wants to see."""

    def __init__(self, function: Callable[..., Any], weight: float, sources: frozenset[str] = frozenset()) -> None:
        if not inspect.isroutine(function):
            raise UserError(f"@reward needs a function with a name, not {function!r}: wrap it in a def")
        self.name: str = function.__name__
        self.function = function
        if not math.isfinite(weight):
            raise UserError(f"reward {self.name}: weight = {weight}; write a finite number")
        self.weight, self.sources = weight, sources
        self._verl, self._trl = is_verl(function), is_trl(function)
        self._wants = [] if self._verl or self._trl else self._wanted()

    def _wanted(self) -> list[str]:
        known = Evidence.__struct_fields__
        wants: list[str] = []
        for parameter in inspect.signature(self.function).parameters.values():
            if parameter.name in known and parameter.kind is not parameter.POSITIONAL_ONLY:
                wants.append(parameter.name)
            elif parameter.default is parameter.empty:
                raise UserError(f"reward {self.name} asks for {parameter}; it may ask for {', '.join(known)}")
        return wants

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def only_for(self, *sources: str) -> "Reward":
        """The same for tasks whose `data_source` is one of these; others it does not score."""
        return Reward(self.function, self.weight, frozenset(sources))

    def weighted(self, weight: float) -> "Reward":
        return Reward(self.function, weight, self.sources)

    def is_for(self, task: Task) -> bool:
        return not self.sources or task.extra.get("data_source") in self.sources

    def arguments(self, evidence: Evidence) -> dict[str, Any]:
        if self._verl:
            return for_verl(self.function, evidence)
        if self._trl:
            return for_trl(self.function, evidence)
        return {name: getattr(evidence, name) for name in self._wants}

    def value(self, returned: Any) -> Any:
        """What it returned for this one trajectory."""
        return of_one(returned) if self._trl else returned


def reward(function: Callable[..., Any] | None = None, *, weight: float = 1.0) -> Any:
    """Make a reward of a function whose parameters are any of `answer`, `task`, `messages`, `trajectory`; or of one
    that was written for verl or TRL.

    >>> @reward
    ... def short(answer: str) -> bool:
    ...     return len(answer) < 100
    """

    def make(wrapped: Callable[..., Any]) -> Reward:
        return Reward(wrapped, weight)

    return make if function is None else make(function)


async def score(rewards: Sequence[Reward], evidence: Evidence, seconds: float, calls: UserCalls) -> Score:
    """Run every reward, all of them within `seconds`. Raises RewardFailed."""
    total: float | None = None
    parts: dict[str, float] = {}
    deadline = time.monotonic() + seconds
    for each in rewards:
        if not each.is_for(evidence.task):
            continue
        said = await _one(each, evidence, max(0.0, deadline - time.monotonic()), calls)
        if each.name in said:
            total = (total or 0.0) + each.weight * said[each.name]
        parts.update(said)
    return Score(total, parts)


async def _one(each: Reward, evidence: Evidence, seconds: float, calls: UserCalls) -> dict[str, float]:
    """The reward's number by its name, and what else it said. {} for no score."""
    try:
        value = each.value(await calls.call(each.function, each.arguments(evidence), seconds))
        return _numbers(each.name, value)
    except (OutOfTime, TooManyStuck) as error:
        raise RewardFailed(f"reward {each.name} did not end in time {error}") from error
    except Exception as error:
        raise RewardFailed(f"reward {each.name} raised:\n{traceback.format_exc()}") from error


def _numbers(name: str, value: Any) -> dict[str, float]:
    if value is None:
        return {}
    if isinstance(value, dict):  # as verl's may: the score, and what is worth a line in the log
        others = {f"{name}.{key}": each for key, each in value.items() if key != "score"}
        numbers = {key: float(each) for key, each in others.items() if isinstance(each, bool | int | float)}
        return {**_numbers(name, value["score"]), **{k: each for k, each in numbers.items() if math.isfinite(each)}}
    if isinstance(value, str):  # float() would take "1"
        raise TypeError(f"it returned the text {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"it returned {value}; a reward is a finite number, or None for no score")
    return {name: number}
