"""Whether one more group may be opened: the gate, the memory, the steps and the tasks that are left.

Invariant: whatever says no names the knob, or what it waits for.
"""

import logging

from slipstream.config import Config
from slipstream.queue.depth import Depth
from slipstream.queue.memory import budget
from slipstream.queue.sampler import TaskSampler
from slipstream.queue.state import LedgerState

log = logging.getLogger(__name__)


class Capacity:
    def __init__(self, config: Config, depth: Depth, sampler: TaskSampler, state: LedgerState) -> None:
        self._config, self._depth, self._sampler, self._state = config, depth, sampler, state
        self.memory = budget(config.queue.memory_mb)  # bytes
        self._full = False

    def closed(self) -> str:
        """Why no group is opened; "" if one may be."""
        state, config = self._state, self._config
        counts = f"{state.accepted} groups accepted, {state.opened} running, version {state.version}"
        if state.accepted + state.opened >= config.run.steps * config.learner.batch:
            return f"run.steps = {config.run.steps} need no more: {counts}"
        if self.tasks_are_out():
            return f"the tasks are out: {counts}"
        if self.at_depth():
            return f"depth {self._depth.gate.depth} is full: {counts}; {self._deeper()} or speed up the learner"
        if self._memory_is_full():
            return (
                f"memory is full: {state.bytes_held >> 20} MB of {self.memory >> 20} wait for the learner; raise "
                "queue.memory_mb or speed up the learner"
            )
        return ""

    def at_depth(self) -> bool:
        """Whether the gate is what says no."""
        return self._depth.gate.capacity(self._state.version, self._state.accepted, self._state.opened) < 1

    def _deeper(self) -> str:
        return (
            "staleness.depth = auto may raise it" if self._config.staleness.depth == "auto" else "raise staleness.depth"
        )

    def tasks_are_out(self) -> bool:
        return self._sampler.next(self._state.next_group) is None

    def _memory_is_full(self) -> bool:
        return self._state.bytes_held >= self.memory

    def say_when_full(self) -> None:
        full = self._memory_is_full()
        if full and not self._full:
            log.warning("opens no group: %s", self.closed())
        elif self._full and not full:
            log.info("there is memory again: %d MB of %d are held", self._state.bytes_held >> 20, self.memory >> 20)
        self._full = full
