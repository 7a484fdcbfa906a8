"""One process of a run, and everything it started.

Invariant: each child leads a session of its own; when it ended, whatever its reason, what is left of its session is
killed (a vLLM engine lives on after its rollouter was killed). A child dies with the supervisor. No call here waits:
who watches the children also hears of Ctrl-C.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from slipstream.parent import SUPERVISOR, session

REAP_SECONDS = 5.0  # for a session's processes to be gone after they were killed
LOG_BYTES = 1 << 16  # of a log's end
COMPLAINT = "slipstream: "  # what the line of a user's error begins with


class Child:
    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name, self.log = name, log
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._ended_at: float | None = None  # monotonic
        self._reaped = False
        self.left: list[int] = []  # of its session, although they were killed REAP_SECONDS ago
        self.restarts = 0
        self.not_before = 0.0  # monotonic; the back-off

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, SUPERVISOR: str(os.getpid())},
            )
        self._ended_at, self._reaped, self.left = None, False, []

    @property
    def started(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    def ended(self) -> int | None:
        """The exit code once it and its session are gone (or `left` says what is not); None before."""
        if self._process is None or self._process.poll() is None:
            return None
        if not self._reaped:  # once: its number may be another process's afterwards
            self._ended_at = self._ended_at or time.monotonic()
            self.left = _kill_session(self.pid)
            self._reaped = not self.left or time.monotonic() - self._ended_at > REAP_SECONDS
        return self._process.returncode if self._reaped else None

    def forget(self) -> None:
        """It may be started again."""
        self._process = None

    def ask(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def last_words(self, lines: int = 15) -> str:
        """The end of its log."""
        return "\n".join(self._end_of_log()[-lines:])

    def complaint(self) -> str:
        """What it said of a user's error; libraries may have said something after it."""
        lines = self._end_of_log()
        said = [line for line in lines if line.startswith(COMPLAINT)] or lines[-1:]
        return said[-1].removeprefix(COMPLAINT) if said else f"{self.name} said nothing"

    def _end_of_log(self) -> list[str]:
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_BYTES))
                return log.read().decode(errors="replace").splitlines()
        except OSError:
            return []


def _kill_session(leader: int) -> list[int]:
    """Kill what is left of a session. Those that are still there, without the zombies that are another's to wait for.

    A process that was waited for leaves its children to this one: then there is another look.
    """
    while True:
        waited, left = False, list[int]()
        for pid, zombie in session(leader).items():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            try:
                gone = os.waitpid(pid, os.WNOHANG)[0] == pid  # adopted ones are this process's children
            except ChildProcessError:
                gone = False
                if zombie:
                    continue
            waited |= gone
            if not gone:
                left.append(pid)
        if not waited:
            return left
