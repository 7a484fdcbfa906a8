"""Runs tool calls within limits.

Invariant: every call gets exactly one result, within its time, and nothing a tool does (raise, hang, flood, be called
with nonsense) reaches further than that result, save `ToolFailed`, which says that the infrastructure broke.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from slipstream.errors import UserError
from slipstream.threads import in_daemon_thread
from slipstream.tools.tool import Tool, ToolFailed

# Sync tools that hang keep their thread for ever (Python cannot end one); past this many a call fails at once.
MOST_THREADS = 64


class ToolResult(msgspec.Struct, frozen=True):
    """What the model is shown. `error`: the call did not do what was asked."""

    text: str
    error: bool = False


class Executor:
    """Calls tools by name. Sync tools run in daemon threads, so that a stuck one holds up neither loop nor exit."""

    def __init__(self, tools: Sequence[Tool], seconds: float) -> None:
        self._tools: dict[str, Tool] = {}
        for each in tools:
            if each.name in self._tools:
                raise UserError(f"two tools are named {each.name}; rename one")
            self._tools[each.name] = each
        self._seconds = seconds
        self._threads = threading.BoundedSemaphore(MOST_THREADS)

    async def call(self, name: str, arguments: str) -> ToolResult:
        """Run one call; `arguments` is a JSON object. Raises ToolFailed only."""
        found = self._tools.get(name)
        if found is None:
            return ToolResult(f"Error: there is no tool {name!r}; there are {', '.join(self._tools) or 'none'}", True)
        try:
            decoded = msgspec.json.decode(arguments, type=found.arguments)
        except msgspec.DecodeError as error:  # ValidationError is one
            return ToolResult(f"Error: {name}: {error}", True)
        try:
            async with asyncio.timeout(self._seconds):
                value = await self._run(found, {key: getattr(decoded, key) for key in decoded.__struct_fields__})
        except TimeoutError:
            return ToolResult(f"Error: {name} did not end within {self._seconds:g} s", True)
        except ToolFailed:
            raise
        except Exception as error:
            return ToolResult(f"Error: {error or type(error).__name__}".replace("\n", " "), True)
        return ToolResult(as_text(value))

    async def _run(self, found: Tool, arguments: dict[str, Any]) -> Any:
        if found.is_async:
            return await found.function(**arguments)
        return await self._in_thread(lambda: found.function(**arguments))

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        if not self._threads.acquire(blocking=False):
            raise ToolFailed(f"{MOST_THREADS} sync tool calls are stuck; make the tool async, or give it a timeout")
        return await in_daemon_thread(work, self._threads.release)


def as_text(value: Any) -> str:
    """A tool's return value as the model reads it: text as it is, anything else as JSON."""
    if isinstance(value, str):
        return value
    return msgspec.json.encode(value, enc_hook=str).decode()
