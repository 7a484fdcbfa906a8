"""Nothing of a run outlives what started it: the kernel kills a process together with its parent.

Invariant: after `die_with_parent` this process does not survive `parent`, also when that one was dead already.
"""

import ctypes
import os
import signal
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SUPERVISOR = "SLIPSTREAM_SUPERVISOR"  # environment variable: the pid of who started this process


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with_supervisor() -> None:
    """For a process that may have a supervisor: it is its parent, or it is gone."""
    supervisor = os.environ.get(SUPERVISOR)
    if supervisor is None:
        return
    die_with_parent()
    if os.getppid() != int(supervisor):
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Processes whose parent dies become this process's children, and not init's."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def session(leader: int) -> dict[int, bool]:
    """The processes of the session that `leader` began, itself included; True for one that ended and was not waited
    for."""
    found: dict[int, bool] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        state, session_id = fields[0], int(fields[3])
        if session_id == leader:
            found[int(entry.name)] = state == "Z"
    return found
