"""Blocking work off the event loop, in threads that the process need not wait for when it ends.

Invariant: awaiting never outlives its timeout because of the thread, and a thread that hangs for ever holds up neither
the event loop nor the interpreter's exit (which `asyncio.to_thread` would).
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Any


async def in_daemon_thread(work: Callable[[], Any], ended: Callable[[], None] = lambda: None) -> Any:
    """Await `work()` in a thread of its own; `ended` is called in that thread when it is over."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():
            return  # cancelled: nobody waits for this any more
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def body() -> None:
        value, error = None, None
        try:
            value = work()
        except StopIteration as stop:  # a Future refuses to hold one
            error = RuntimeError(f"StopIteration: {stop}")
        except BaseException as caught:  # SystemExit in a tool must not end the rollouter
            error = caught if isinstance(caught, Exception) else RuntimeError(f"{type(caught).__name__}: {caught}")
        finally:
            ended()
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:
            return  # the loop is closed

    threading.Thread(target=body, daemon=True).start()
    return await future
