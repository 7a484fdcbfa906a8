"""Runs tool calls within limits.

Invariant: every call gets exactly one result, within its time, and nothing a tool does (raise, hang, flood, be called
with nonsense) reaches further than that result, save `ToolFailed`, which says that the infrastructure broke.
"""

import asyncio
import contextlib
import json
import logging
import time
import types
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from enum import StrEnum
from typing import Any

import msgspec

from slipstream.task import Task
from slipstream.tools.tool import Tool, ToolFailed
from slipstream.tools.toolset import Factory, Toolbox, ToolSet, kind
from slipstream.tooluse import ToolUse
from slipstream.usercall import OutOfTime, TooManyStuck, UserCalls

log = logging.getLogger(__name__)

_FREE = contextlib.nullcontext()


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
    """Runs the calls of all trajectories of one process."""

    def __init__(self, toolbox: Toolbox, seconds: float, at_once: int = 0) -> None:
        """`seconds`: of one call. `at_once`: calls of all tools side by side; 0 for no limit."""
        self.toolbox = toolbox
        self.use = {name: ToolUse(name=name) for name in toolbox.tools}
        self.all_slots = asyncio.Semaphore(at_once) if at_once else _FREE
        self.seconds = seconds
        self.calls = UserCalls()
        self.slots = {name: asyncio.Semaphore(each.at_once) for name, each in toolbox.tools.items() if each.at_once}
        self._ending: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def session(self, task: Task) -> "AsyncGenerator[Session]":
        """The calls of one trajectory. What they set up is torn down on the way out, also when that is cancelled."""
        session = Session(self, task)
        try:
            yield session
        finally:
            if session.made:
                ending = asyncio.ensure_future(session.teardown())
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)
                await asyncio.shield(ending)


class Session:
    """The calls of one trajectory, and the objects that hold its tools' state."""

    def __init__(self, executor: Executor, task: Task) -> None:
        self._executor, self._task = executor, task
        self._locks: defaultdict[Factory, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.made: dict[Factory, ToolSet] = {}

    async def call(self, name: str, arguments: str) -> ToolResult:
        """Run one call; `arguments` is a JSON object. Raises ToolFailed only."""
        box = self._executor.toolbox
        found = box.tools.get(name)
        if found is None:
            known = ", ".join(box.tools) or "none"
            return ToolResult.failure(ToolError.UNKNOWN_TOOL, f"there is no tool {name!r}; there are: {known}")
        try:
            given = found.read(arguments)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:  # ValidationError is a DecodeError
            self._executor.use[name].refuse()
            return ToolResult.failure(ToolError.BAD_ARGUMENTS, f"{name}: {error}")
        factory = box.factories.get(name)
        # In this order: who waits for its own trajectory's call, or for its tool, holds no slot that others want.
        lock, slot = self._locks[factory] if factory else _FREE, self._executor.slots.get(name, _FREE)
        async with lock, slot, self._executor.all_slots:
            function = found.function
            if factory:
                function = types.MethodType(function, await self._state(factory))
            return await self._measured(found, function, given)

    async def _measured(self, each: Tool, function: Callable[..., Any], given: dict[str, Any]) -> ToolResult:
        began, error = time.monotonic(), True
        try:
            result = await self._try(each, function, given)
            for _ in range(each.retries):
                if result.error is None:
                    break
                result = await self._try(each, function, given)
            error = result.error is not None
            return result
        finally:
            self._executor.use[each.name].add(time.monotonic() - began, error=error)

    async def save(self) -> dict[str, bytes] | None:
        """The state of all that was made, by its class's name; None where one cannot be saved."""
        states: dict[str, bytes] = {}
        for made in self.made.values():
            name = type(made).__name__
            try:
                state = await self._executor.calls.call(made.save, {}, self._executor.seconds)
            except Exception:
                log.warning("%s.save failed; the trajectory is not parked", name, exc_info=True)
                return None
            if state is None or name in states:
                return None
            states[name] = state
        return states

    async def restore(self, states: dict[str, bytes]) -> None:
        """Make what `save` found. Raises ToolFailed."""
        factories = {kind(factory).__name__: factory for factory in self._executor.toolbox.factories.values()}
        for name, state in states.items():
            if name not in factories:
                raise ToolFailed(f"there is no ToolSet {name} here")
            made = await self._state(factories[name])
            try:
                await self._executor.calls.call(made.restore, {"state": state}, self._executor.seconds)
            except Exception as error:
                raise ToolFailed(f"{name}.restore: {type(error).__name__}: {error}") from error

    async def _state(self, factory: Factory) -> ToolSet:
        if factory not in self.made:
            calls, seconds, name = self._executor.calls, self._executor.seconds, kind(factory).__name__
            try:
                self.made[factory] = made = factory()
                await calls.call(made.setup, {"task": self._task}, seconds)
            except OutOfTime as error:
                raise ToolFailed(f"{name}.setup did not end within {seconds:g} s") from error
            except Exception as error:
                raise ToolFailed(f"{name}.setup raised {type(error).__name__}: {error}") from error
        return self.made[factory]

    async def _try(self, each: Tool, function: Callable[..., Any], given: dict[str, Any]) -> ToolResult:
        seconds = self._executor.seconds
        try:
            return ToolResult(as_text(await self._executor.calls.call(function, given, seconds)))
        except OutOfTime:
            return ToolResult.failure(ToolError.TIMED_OUT, f"{each.name} did not end within {seconds:g} s")
        except TooManyStuck as error:
            raise ToolFailed(f"{each.name}: {error}") from error
        except ToolFailed:
            raise
        except Exception as error:
            return ToolResult.failure(ToolError.RAISED, str(error) or type(error).__name__)

    async def teardown(self) -> None:
        """Each object's, within a call's time; one that fails is logged, and keeps none of the others."""
        for made in self.made.values():
            name = type(made).__name__
            try:
                await self._executor.calls.call(made.teardown, {}, self._executor.seconds)
            except OutOfTime:
                log.warning("%s.teardown did not end within %g s; it was left", name, self._executor.seconds)
            except Exception:
                log.warning("%s.teardown raised; what it had opened may be left", name, exc_info=True)


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
