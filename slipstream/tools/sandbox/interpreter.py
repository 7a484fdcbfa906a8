"""A Python interpreter that keeps its variables from call to call, in a sandbox.

Invariant: what one call defined the next one sees, or the next one is told that the interpreter was started anew; and
`close` leaves no process.
"""

import asyncio
import contextlib
import json
import socket

from slipstream.tools.sandbox.sandbox import Output, Ran, Sandbox, opened, source, until_over

INSIDE = source(__file__, "inside_interpreter.py")


class Interpreter:
    """Not for two calls at once: they wait for each other."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._open = contextlib.AsyncExitStack()
        self._output: Output | None = None
        self._control: socket.socket | None = None
        self._lock = asyncio.Lock()

    async def run(self, code: str, *, seconds: float = 0.0) -> Ran:
        """Run code in the interpreter, which is started when there is none. `seconds`: as with `Sandbox.run`."""
        async with self._lock, self._sandbox.slots:
            try:
                if self._output is None or self._control is None:
                    self._output, self._control = await self._start()
                ran = await self._exchange(code, self._output, self._control, seconds or self._sandbox.limits.seconds)
            except BaseException:  # cancelled: what it was doing goes on inside, so it is of no use any more
                await self.close()
                raise
            if ran.lost:
                await self.close()
            return ran

    async def close(self) -> None:
        self._output = self._control = None
        await self._open.aclose()

    async def _start(self) -> tuple[Output, socket.socket]:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._open.callback(ours.close)
        output = self._open.enter_context(opened(Output(self._sandbox.limits.output_bytes)))
        with theirs:
            await self._open.enter_async_context(
                self._sandbox.process(
                    INSIDE,
                    output=output,
                    name="interpreter",
                    arguments={"control": theirs.fileno(), "cpu_seconds": self._sandbox.limits.cpu_seconds},
                    descriptors=(theirs.fileno(),),
                    cpu_limited=False,  # each call has its own share, which is set inside
                )
            )
        return output, ours

    async def _exchange(self, code: str, output: Output, control: socket.socket, seconds: float) -> Ran:
        loop = asyncio.get_running_loop()

        async def answered() -> bytes:
            try:
                await loop.sock_sendall(control, json.dumps(code).encode() + b"\n")
                return await loop.sock_recv(control, 1)
            except OSError:  # it went away
                return b""

        answer = asyncio.ensure_future(answered())
        how = await until_over(answer, output, seconds)
        alive = answer.done() and not answer.cancelled() and answer.result() == b"\n"
        return Ran(output.take(), how, lost=not alive)
