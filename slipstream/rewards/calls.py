"""Whether a trajectory called the functions that its task asks for.

Invariant: arguments are compared as values, not as text; 1 and 1.0 are the same number, true is not 1.
"""

from typing import Any

import msgspec

from slipstream.rewards.reward import reward
from slipstream.task import Task


class Call(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any] = {}


@reward
def function_calls(messages: list[dict[str, Any]], task: Task) -> bool:
    """1 when the calls of all turns are those of `calls` beside the task ([{"name", "arguments"}]), in any order."""
    try:
        wanted = msgspec.convert(task.extra.get("calls"), list[Call])
    except msgspec.ValidationError as error:
        raise ValueError(f'task {task.id}: "calls" is no list of {{"name", "arguments"}}: {error}') from error
    left = made(messages)
    for call in wanted:
        same = next((at for at, each in enumerate(left) if each.name == call.name and alike(each, call)), None)
        if same is None:
            return False
        del left[same]
    return not left


def made(messages: list[dict[str, Any]]) -> list[Call]:
    """All calls that the model made, bad ones included."""
    functions = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    return [
        Call(each["name"], each["arguments"] if isinstance(each["arguments"], dict) else _object(each["arguments"]))
        for each in functions
    ]


def _object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return {"": text}  # equals no call that is wanted


def alike(one: Call, other: Call) -> bool:
    return same_value(one.arguments, other.arguments)


def same_value(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    return bool(one == other)
