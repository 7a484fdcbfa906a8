"""Calls of a user's functions (tools, rewards), sync or async, within a time.

Invariant: a call returns, raises or is given up within its time, whatever the function does: raise SystemExit, hang,
swallow its cancellation. A thread that hangs for ever holds up neither the event loop, nor the interpreter's exit
(which `asyncio.to_thread` would), nor the calls after it.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any

AT_ONCE = 32  # sync functions that run side by side; more wait for their turn
MOST_STUCK = 256  # threads that were given up and still run; past this the process is no good any more


class OutOfTime(Exception):
    """The function did not end within its time."""


class TooManyStuck(Exception):
    """So many sync functions never ended that no more are started."""


class UserCalls:
    """Runs sync functions in daemon threads and async ones in tasks, and never waits for one past its time."""

    def __init__(self, *, at_once: int = AT_ONCE, most_stuck: int = MOST_STUCK) -> None:
        self._slots = asyncio.Semaphore(at_once)
        self._most_stuck = most_stuck
        self._stuck: set[threading.Thread] = set()
        self._given_up: set[asyncio.Task[Any]] = set()  # cancelled, but not over yet; kept from the garbage collector

    async def call(self, function: Callable[..., Any], arguments: dict[str, Any], seconds: float) -> Any:
        """What the function returns or raises; OutOfTime or TooManyStuck."""
        if inspect.iscoroutinefunction(function):
            return await self._in_task(function(**arguments), seconds)
        value = await self._in_thread(lambda: function(**arguments), seconds)
        if inspect.iscoroutine(value):  # a decorator hid that the function is async
            return await self._in_task(value, seconds)
        return value

    async def _in_task(self, coroutine: Coroutine[Any, Any, Any], seconds: float) -> Any:
        task = asyncio.ensure_future(_without_exits(coroutine))
        try:
            await asyncio.wait({task}, timeout=seconds)
        finally:  # also when we are cancelled
            if not task.done():
                task.cancel()
                self._given_up.add(task)
                task.add_done_callback(self._bury)
        if task in self._given_up:
            raise OutOfTime
        if task.cancelled():
            raise RuntimeError("it was cancelled from within")
        return task.result()

    def _bury(self, task: "asyncio.Task[Any]") -> None:
        self._given_up.discard(task)
        if not task.cancelled():
            task.exception()  # nobody asks for it; asyncio would log that

    async def _in_thread(self, work: Callable[[], Any], seconds: float) -> Any:
        self._stuck = {thread for thread in self._stuck if thread.is_alive()}
        if len(self._stuck) >= self._most_stuck:
            raise TooManyStuck(
                f"{len(self._stuck)} calls of sync functions never ended; give them timeouts of their own"
            )
        async with self._slots:  # left when the call is given up: its thread counts as stuck from then on
            loop = asyncio.get_running_loop()
            ended: asyncio.Future[tuple[Any, Exception | None]] = loop.create_future()
            thread = threading.Thread(target=_body, args=(work, loop, ended), daemon=True, name="slipstream user call")
            thread.start()
            try:
                await asyncio.wait({ended}, timeout=seconds)
            finally:
                if not ended.done():
                    ended.cancel()
                    self._stuck.add(thread)
            if ended.cancelled():
                raise OutOfTime
            value, error = ended.result()
            if error is not None:
                raise error
            return value


def _body(
    work: Callable[[], Any], loop: asyncio.AbstractEventLoop, ended: "asyncio.Future[tuple[Any, Exception | None]]"
) -> None:
    value: Any = None
    error: Exception | None = None
    try:
        value = work()
    except Exception as raised:
        error = raised
    except BaseException as raised:  # SystemExit in a tool must not end the process
        error = RuntimeError(f"{type(raised).__name__}: {raised}")

    def settle() -> None:
        if not ended.done():
            ended.set_result((value, error))

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:
        return  # the loop is closed: nobody waits any more


async def _without_exits(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as raised:  # asyncio lets these end the loop
        raise RuntimeError(f"{type(raised).__name__}: {raised}") from raised
