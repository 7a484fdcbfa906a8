"""How a process is shut in: bubblewrap's namespaces where there are any, limits of the kernel in either case.

Invariant: under bubblewrap the process sees the system's libraries and one Python, read-only, an empty home in memory,
no network, no process but its own, and dies with its parent. PLAIN promises the limits and the clock, nothing else.
"""

import functools
import logging
import os
import random
import shutil
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

log = logging.getLogger(__name__)

HOME = "/tmp"
READABLE = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/alternatives")
NAMESPACES = ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")


class Backend(StrEnum):
    BUBBLEWRAP = "bubblewrap"
    PLAIN = "plain"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one sandboxed process may use."""

    seconds: Annotated[float, Meta(gt=0)] = 5.0  # wall clock of a call; keep it below rollout.tool_seconds
    cpu_seconds: Annotated[int, Meta(ge=1)] = 5  # of each process
    memory_mb: Annotated[int, Meta(ge=32)] = 512  # address space of each process
    processes: Annotated[int, Meta(ge=1)] = 16  # threads count; not enforced by PLAIN for root
    file_mb: Annotated[int, Meta(ge=1)] = 64  # each file, and under bubblewrap all of them
    output_bytes: Annotated[int, Meta(ge=1)] = 1 << 18  # what prints more is ended


class Jail(msgspec.Struct, frozen=True):
    """A way to start Python, and the user id that the process must then take (0: it stays who it is)."""

    command: list[str]
    home: str
    user: int


def jail(backend: Backend, limits: Limits, *, packages: bool, home: str = HOME) -> Jail:
    """`packages`: whether the process may import what is installed beside us, or the standard library alone."""
    python = [sys.executable if packages else _base_python(), "-I", *([] if packages else ["-S"])]
    if backend is Backend.PLAIN:
        return Jail(python, home, 0)
    root = os.geteuid() == 0
    # For root the limit on processes would not count: it becomes a user whom nobody else is, inside.
    user = random.SystemRandom().randrange(20_000, 60_000) if root else 0
    return Jail([*_bubblewrap(root), *_mounts(limits, packages=packages), "--", *python], HOME, user)


def _bubblewrap(root: bool) -> list[str]:
    rights = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if root else ["--unshare-user"]
    return ["bwrap", *NAMESPACES, *rights, "--die-with-parent", "--new-session", "--hostname", "sandbox"]


def _mounts(limits: Limits, *, packages: bool) -> list[str]:
    mounts = ["--perms", "0755", "--dir", "/etc"]
    for path in READABLE:
        mounts += ["--ro-bind-try", path, path]
    mounts += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(limits.file_mb << 20)]
    # Before the prefixes: one of them may lie in there.
    mounts += ["--tmpfs", HOME, "--chdir", HOME, "--clearenv", "--setenv", "HOME", HOME, "--setenv", "LANG", "C.UTF-8"]
    prefixes = {sys.base_prefix, os.path.realpath(sys.base_prefix)} | ({sys.prefix} if packages else set[str]())
    for prefix in sorted(prefixes):
        if prefix != "/usr":
            for parent in reversed(Path(prefix).parents[:-1]):  # bubblewrap would make them for its own user only
                mounts += ["--perms", "0755", "--dir", str(parent)]
            mounts += ["--ro-bind", prefix, prefix]
    return [*mounts, "--setenv", "PATH", "/usr/bin:/bin"]


def _base_python() -> str:
    return os.path.realpath(sys.executable)


@functools.cache
def find_backend() -> Backend:
    """Bubblewrap when it is there and the kernel lets it; else PLAIN, with a warning that says what to do."""
    if shutil.which("bwrap") is None:
        why = "bubblewrap is not installed (on Debian or Ubuntu: apt install bubblewrap)"
    else:
        shut = jail(Backend.BUBBLEWRAP, Limits(), packages=False)
        tried = subprocess.run([*shut.command, "-c", "pass"], capture_output=True, text=True, timeout=30)
        if tried.returncode == 0:
            return Backend.BUBBLEWRAP
        why = f"bubblewrap does not work here ({' '.join(tried.stderr.split())[-200:]})"
    log.warning(
        "NO SANDBOX: %s. Code that the model writes runs as this user, sees this user's files and the network; only "
        "its memory, time and output are limited",
        why,
    )
    return Backend.PLAIN
