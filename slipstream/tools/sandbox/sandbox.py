"""Runs Python programs in sandboxed processes.

Invariant: a process that was started here is gone when the call that started it is over, however that ends: by itself,
by its clock, by printing too much, or by the caller's cancellation. No more than `output_bytes` of what it printed is
ever held.
"""

import asyncio
import contextlib
import marshal
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Generator
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from slipstream.parent import session
from slipstream.tools.sandbox.jail import Backend, Limits, find_backend, jail


def source(beside: str, name: str) -> str:
    """The text of a file that is run inside: it lies beside the module that hands it over."""
    return Path(beside).with_name(name).read_text()


INSIDE = source(__file__, "inside.py")
AT_ONCE = 2 * (os.cpu_count() or 1)  # more only wait for each other, while their clocks run

STANDARD = Limits()


class How(StrEnum):
    """How a call ended."""

    EXITED = "exited"
    TIMED_OUT = "timed_out"
    FLOODED = "flooded"  # it printed more than it may


class Ran(msgspec.Struct, frozen=True):
    """`output`: what was printed, stdout and stderr as they came. `code`: of the exit, -N for signal N.
    `lost`: of an interpreter, whether its variables are gone."""

    output: str
    how: How
    code: int = 0
    lost: bool = False


class Output:
    """What sandboxed processes print, held up to a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = bytearray()
        self.flooded = asyncio.Event()
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        asyncio.get_running_loop().add_reader(self._reading, self._read)

    def _read(self) -> bool:
        """Whether there may be more."""
        if self.flooded.is_set():
            asyncio.get_running_loop().remove_reader(self._reading)
            return False
        try:
            chunk = os.read(self._reading, 1 << 16)
        except BlockingIOError:
            return False
        if not chunk:
            asyncio.get_running_loop().remove_reader(self._reading)
        self._held += chunk
        if len(self._held) > self._limit:
            del self._held[self._limit :]
            self.flooded.set()
        return bool(chunk)

    def take(self) -> str:
        """All that was printed since the last time."""
        while self._read():
            pass
        text = self._held.decode("utf-8", "replace")
        self._held.clear()
        return text

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._reading)
        os.close(self._reading)
        os.close(self.writing)


class Sandbox:
    """Starts programs. `packages`: they may import what is installed, and not the standard library alone."""

    def __init__(self, limits: Limits = STANDARD, *, packages: bool = False, backend: Backend | None = None) -> None:
        self.limits = limits
        self.backend = backend or find_backend()
        self._packages = packages
        self.slots = asyncio.Semaphore(AT_ONCE)

    async def run(self, code: str, *, stdin: str = "", seconds: float = 0.0, errors: bool = True) -> Ran:
        """Run a program to its end. `seconds`: its time, where that is not the sandbox's own. `errors`: whether what
        it writes to stderr is part of the output."""
        async with self.slots:
            with opened(Output(self.limits.output_bytes)) as output:
                async with self.process(code, output=output, stdin=stdin, errors=errors) as process:
                    how = await until_over(process.wait(), output, seconds or self.limits.seconds)
                code_ = process.returncode or 0
                return Ran(output.take(), how, -(code_ - 128) if code_ > 128 else code_)

    @contextlib.asynccontextmanager
    async def process(
        self,
        program: str,
        *,
        output: "Output | None" = None,
        stdin: str = "",
        name: str = "program.py",
        arguments: dict[str, Any] | None = None,
        descriptors: tuple[int, ...] = (),
        cpu_limited: bool = True,
        errors: bool = True,
    ) -> AsyncGenerator[asyncio.subprocess.Process]:
        """A process that runs `program` with `arguments` as its globals; it is ended on the way out."""
        home = tempfile.mkdtemp(prefix="slipstream-sandbox-") if self.backend is Backend.PLAIN else ""
        shut = jail(self.backend, self.limits, packages=self._packages, home=home)
        limits = {
            "memory_mb": self.limits.memory_mb,
            "processes": self.limits.processes,
            "file_mb": self.limits.file_mb,
            "cpu_seconds": self.limits.cpu_seconds if cpu_limited else 0,
            "namespaced": self.backend is Backend.BUBBLEWRAP,
        }
        job = {"limits": limits, "user": shut.user, "program": program, "name": name, "arguments": arguments or {}}
        try:
            with _in_memory(marshal.dumps(job)) as handed, _in_memory(stdin.encode("utf-8", "replace")) as typed:
                process = await asyncio.create_subprocess_exec(
                    *shut.command,
                    "-c",
                    INSIDE,
                    str(handed),
                    stdin=typed,
                    stdout=output.writing if output else subprocess.DEVNULL,
                    stderr=output.writing if output and errors else subprocess.DEVNULL,
                    pass_fds=(handed, *descriptors),
                    start_new_session=True,
                    cwd=home or "/",
                    env={"HOME": shut.home, "PATH": "/usr/bin:/bin:/usr/local/bin", "LANG": "C.UTF-8"},
                )
            try:
                yield process
            finally:
                await self._end(process)
        finally:
            if home:
                shutil.rmtree(home, ignore_errors=True)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # bubblewrap's own death ends all that is in its namespace
        if self.backend is Backend.PLAIN:
            for pid in session(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        await process.wait()


async def until_over(awaited: Any, output: Output, seconds: float) -> How:
    """Wait for what is awaited, at most so long, and only while the output is not too much."""
    ending, flooding = asyncio.ensure_future(awaited), asyncio.ensure_future(output.flooded.wait())
    try:
        await asyncio.wait({ending, flooding}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if output.flooded.is_set():
            return How.FLOODED
        return How.EXITED if ending.done() else How.TIMED_OUT
    finally:
        ending.cancel()
        flooding.cancel()


@contextlib.contextmanager
def opened(output: Output) -> Generator[Output]:
    try:
        yield output
    finally:
        output.close()


@contextlib.contextmanager
def _in_memory(content: bytes) -> Generator[int]:
    """A descriptor from which a process reads `content`: no pipe to fill, no file to find."""
    descriptor = os.memfd_create("slipstream")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)
