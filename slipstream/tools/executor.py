"""Runs tool calls within limits.

Invariant: every call gets exactly one result, within its time, and nothing a tool does (raise, hang, flood, be called
with nonsense) reaches further than that result, save `ToolFailed`, which says that the infrastructure broke.
"""

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from slipstream.errors import UserError
from slipstream.tools.tool import Tool, ToolFailed
from slipstream.usercall import OutOfTime, TooManyStuck, UserCalls


class ToolError(StrEnum):
    """Why a call did not do what was asked."""

    BAD_CALL = "bad_call"  # what the model said could not be read as a call
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    RAISED = "raised"
    TIMED_OUT = "timed_out"


class ToolResult(msgspec.Struct, frozen=True):
    """What the model is shown. `error`: None when the call did what was asked."""

    text: str
    error: ToolError | None = None

    @staticmethod
    def failure(error: ToolError, text: str) -> "ToolResult":
        """An error in one line."""
        return ToolResult(well_formed("Error: " + " ".join(text.split())), error)


class Executor:
    """Calls tools by name."""

    def __init__(self, tools: Sequence[Tool], seconds: float) -> None:
        self._tools: dict[str, Tool] = {}
        for each in tools:
            if each.name in self._tools:
                raise UserError(f"two tools are named {each.name!r}; rename one")
            self._tools[each.name] = each
        self._seconds = seconds
        self._calls = UserCalls()

    async def call(self, name: str, arguments: str) -> ToolResult:
        """Run one call; `arguments` is a JSON object. Raises ToolFailed only."""
        found = self._tools.get(name)
        if found is None:
            known = ", ".join(self._tools) or "none"
            return ToolResult.failure(ToolError.UNKNOWN_TOOL, f"there is no tool {name!r}; there are: {known}")
        try:
            decoded = msgspec.json.decode(arguments, type=found.arguments)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:  # ValidationError is a DecodeError
            return ToolResult.failure(ToolError.BAD_ARGUMENTS, f"{name}: {error}")
        given = {key: getattr(decoded, key) for key in decoded.__struct_fields__}
        try:
            return ToolResult(as_text(await self._calls.call(found.function, given, self._seconds)))
        except OutOfTime:
            return ToolResult.failure(ToolError.TIMED_OUT, f"{name} did not end within {self._seconds:g} s")
        except TooManyStuck as error:
            raise ToolFailed(f"{name}: {error}") from error
        except ToolFailed:
            raise
        except Exception as error:
            return ToolResult.failure(ToolError.RAISED, str(error) or type(error).__name__)


def as_text(value: Any) -> str:
    """A tool's return value as the model reads it: text as it is, anything else as JSON."""
    if not isinstance(value, str):  # the standard library's JSON, for whole numbers of any size
        value = json.dumps(msgspec.to_builtins(value, enc_hook=_plain, str_keys=True), ensure_ascii=False)
    return well_formed(value)


def well_formed(text: str) -> str:
    """Without lone surrogates, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()


def _plain(value: Any) -> Any:
    """numpy's and torch's numbers and arrays as lists, anything else as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
