"""CPU seconds of this process and all that it started: what a system of many processes spends."""

import contextlib
import time

import psutil
from corpus import Cost


class TreeMeter:
    """Counts the processes that are there when it is made, and those that they start until `cost` is asked."""

    def __init__(self) -> None:
        self._before, self._began = _seconds(), time.perf_counter()

    def cost(self, tokens: int) -> Cost:
        after = _seconds()
        spent = sum(seconds - self._before.get(pid, 0.0) for pid, seconds in after.items())
        return Cost(tokens, spent, time.perf_counter() - self._began)


def _seconds() -> dict[int, float]:
    here = psutil.Process()
    found: dict[int, float] = {}
    for process in (here, *here.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
    return found
