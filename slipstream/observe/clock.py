"""Honest clocks: all of a process's wall time is in exactly one named part; the parts sum to the wall time.

Invariant: it may be read from any thread, at any moment.
"""

import threading
import time
from collections.abc import Callable

import msgspec


class ClockReading(msgspec.Struct, kw_only=True):
    """Where a process's wall time went so far, in seconds by part."""

    process: str
    parts: dict[str, float]
    now: str  # the current part
    why: str = ""  # what it waits for, naming the knob where there is one
    since: float = 0.0  # Unix time the current part began


class Clock:
    """Switch with `enter`; read with `reading`.

    >>> clock = Clock("learner", "starting")
    >>> clock.enter("waiting for data", why="no complete group")
    >>> reading = clock.reading()
    >>> reading.now
    'waiting for data'
    """

    def __init__(self, process: str, part: str, *, now: Callable[[], float] = time.monotonic) -> None:
        self._process, self._part, self._now = process, part, now
        self._parts: dict[str, float] = {}
        self._start = now()
        self._since_unix = time.time()
        self._why = ""
        self._lock = threading.Lock()

    def enter(self, part: str, why: str = "") -> None:
        with self._lock:
            self._why = why
            if part == self._part:
                return
            at = self._now()
            self._parts[self._part] = self._parts.get(self._part, 0.0) + at - self._start
            self._part, self._start, self._since_unix = part, at, time.time()

    def reading(self) -> ClockReading:
        with self._lock:
            parts = dict(self._parts)
            parts[self._part] = parts.get(self._part, 0.0) + self._now() - self._start
            return ClockReading(
                process=self._process, parts=parts, now=self._part, why=self._why, since=self._since_unix
            )
