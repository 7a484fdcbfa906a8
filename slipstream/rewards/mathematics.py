"""Whether the last \\boxed{} says the same as the task's answer, as the math-verify package compares.

Invariant: only the last box counts, and a turn that boxes many answers has none. SymPy, which may take for ever over
what a model writes, runs in a process of its own that is ended in time: that is 0, since the answer cannot be read.
"""

import asyncio

from slipstream.rewards.reward import Reward, reward
from slipstream.task import Task
from slipstream.tools.sandbox import Interpreter, Limits, Sandbox

MOST_BOXES = 5  # more of them is guessing
LONGEST = 2_000  # characters of an answer
STARTING = Limits(seconds=60, cpu_seconds=60, memory_mb=2048)  # SymPy is slow to import
PREPARE = """
import logging; logging.disable(logging.CRITICAL)
from math_verify import parse, verify
def same(gold, said):
    gold, said = (parse(f"\\\\boxed{{{text}}}", parsing_timeout=None) for text in (gold, said))
    return "no gold" if not gold else "yes" if said and verify(gold, said, timeout_seconds=None) else "no"
same("1", "1")
"""


def boxes(text: str) -> list[str]:
    """What stands in each \\boxed{...}, braces counted; a box that is not closed is none."""
    found: list[str] = []
    at = 0
    while (start := text.find("\\boxed{", at)) >= 0:
        at = start + len("\\boxed{")
        depth = 1
        for end in range(at, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if not depth:
                found.append(text[at:end].strip())
                at = end
                break
        else:
            break
    return found


def math(*, seconds: float = 5.0, name: str = "math") -> Reward:
    """1 when the last box is the task's answer (its box, where the answer is a whole solution).

    `seconds`: what one comparison may take.
    """
    comparer = Comparer(seconds)

    async def right(answer: str, task: Task) -> bool:
        found = boxes(answer)
        wanted = (boxes(task.answer) or [task.answer])[-1]
        if not wanted.strip():
            raise ValueError(f"task {task.id} has no answer to compare with")
        if not found or not found[-1] or len(found) > MOST_BOXES or len(found[-1]) > LONGEST:
            return False
        return found[-1] == wanted or await comparer.same(wanted, found[-1])

    right.__name__ = name
    return reward(right)


class Comparer:
    """One process with SymPy in it, started at the first comparison and again after one that never ended."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._interpreter: Interpreter | None = None
        self._lock = asyncio.Lock()

    async def same(self, gold: str, said: str) -> bool:
        async with self._lock:
            if self._interpreter is None:
                self._interpreter = await self._start()
            try:
                ran = await self._interpreter.run(f"same({gold!r}, {said!r})", seconds=self._seconds)
            except BaseException:  # the interpreter is gone, and what was prepared in it
                self._interpreter = None
                raise
            if ran.lost:
                self._interpreter = None
            if ran.output == "'no gold'\n":
                raise ValueError(f"the task's answer {gold!r} cannot be read as mathematics")
            return ran.output == "'yes'\n"

    async def _start(self) -> Interpreter:
        interpreter = Interpreter(Sandbox(STARTING, packages=True))
        ran = await interpreter.run(PREPARE)
        if ran.lost or ran.output != "'yes'\n":
            await interpreter.close()
            raise RuntimeError(f"math-verify did not start ({ran.how}): {ran.output[-500:]}")
        return interpreter
