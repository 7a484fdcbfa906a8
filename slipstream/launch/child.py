"""One process of a run, and everything it started.

Invariant: each child leads a session of its own; when it ended, whatever its reason, what is left of its session is
killed (a vLLM engine lives on after its rollouter was killed). A child dies with the supervisor.
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


class Child:
    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name, self.log = name, log
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
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

    @property
    def started(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    def ended(self) -> int | None:
        """The exit code once it ended (its session is gone then); None while it runs."""
        if self._process is None or self._process.poll() is None:
            return None
        self._reap()
        return self._process.returncode

    def forget(self) -> None:
        """It may be started again."""
        self._process = None

    def ask(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once; its session is gone afterwards."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._reap()

    def _reap(self) -> None:
        """Kill what is left of the session, and wait for what of it this process adopted."""
        deadline = time.monotonic() + REAP_SECONDS
        while time.monotonic() < deadline:
            left = session(self.pid)
            ours = [pid for pid in left if _killed(pid)]
            if not ours and all(left.values()):  # what is left, if anything, ended and is another's to wait for
                return
            time.sleep(0.01)

    def last_words(self, lines: int = 15) -> str:
        """The end of its log."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""


def _killed(pid: int) -> bool:
    """Kill it, and wait for its end if it is a child of this process (adopted ones are); whether it was."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        return False
    return True
