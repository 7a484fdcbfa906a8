"""The first thing a sandboxed process runs: it gives up what it must not have, then becomes the program it was given.

Invariant: no line of the program runs before every limit is in place, and none of them can be raised again.
This file is handed over as text (`python -c`), so it imports nothing of the package; it imports little at all, since
that is most of the time that a call takes.
"""

import marshal
import os
import resource
import sys

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, SIGKILL = 1, 4, 9


def limit(kind: int, most: int) -> None:
    """A hard limit, or the one that is there already and lower."""
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(kind, (most, most))


def confine(limits: dict[str, int], user: int) -> None:
    """`user`: an id to become, 0 to stay who one is."""
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_NPROC, limits["processes"])
    limit(resource.RLIMIT_FSIZE, limits["file_mb"] << 20)
    limit(resource.RLIMIT_NOFILE, 256)
    if limits["cpu_seconds"]:
        limit(resource.RLIMIT_CPU, limits["cpu_seconds"])
    if user:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    if not limits["namespaced"]:
        import ctypes

        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, SIGKILL)
        libc.prctl(PR_SET_DUMPABLE, 0)  # no other process of this user reads our memory
    limit(resource.RLIMIT_AS, limits["memory_mb"] << 20)


def become(program: str, name: str, arguments: "dict[str, object]") -> None:
    """Run a program as __main__, with its own lines in tracebacks and none of ours."""
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    module.__dict__.update(arguments)
    try:
        exec(compile(program, name, "exec"), module.__dict__)
    except Exception as error:
        import linecache
        import traceback

        linecache.cache[name] = (len(program), None, program.splitlines(keepends=True), name)
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, frames)
        sys.exit(1)


def main(descriptor: int) -> None:
    with open(descriptor, "rb") as file:
        job = marshal.loads(file.read())
    confine(job["limits"], job["user"])
    sys.argv = [job["name"]]
    sys.setrecursionlimit(10_000)
    become(job["program"], job["name"], job["arguments"])


if __name__ == "__main__":
    main(int(sys.argv[1]))
