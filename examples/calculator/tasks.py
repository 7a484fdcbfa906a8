"""Arithmetic word tasks that need a calculator: one to three operations on numbers too large to do in one's head.

Invariant: a held-out task's first number is a multiple of 7 and a training task's never is, so that no held-out task
is ever trained on, whatever the seeds.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from slipstream import Task

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo")
THINGS = ("apples", "books", "coins", "stamps", "shells", "cards")
PHRASES = {
    "+": ("{name} buys {n} more.", "{name} finds {n} more."),
    "-": ("{name} sells {n}.", "{name} loses {n}."),
    "*": ("The number grows {n} times.",),
}


@dataclass(frozen=True)
class Problem:
    """The first number, and what happens to it, in order."""

    first: int
    steps: tuple[tuple[str, int], ...]  # (operator, number)

    def values(self) -> list[int]:
        """The running value after each step."""
        value, values = self.first, []
        for operator, number in self.steps:
            value = {"+": value + number, "-": value - number, "*": value * number}[operator]
            values.append(value)
        return values


def draw_problem(rng: random.Random, *, heldout: bool) -> Problem:
    first = rng.randrange(210, 1400) * 7 + (0 if heldout else rng.randrange(1, 7))
    steps: list[tuple[str, int]] = []
    for _ in range(rng.choice((1, 2, 3))):
        value = Problem(first, tuple(steps)).values()[-1] if steps else first
        operator = rng.choice("+" if value < 400 else "+-" if value > 20_000 else "+-*")
        low, high = {"+": (120, 9_999), "-": (120, min(value - 200, 9_999)), "*": (12, 99)}[operator]
        steps.append((operator, rng.randint(low, high)))
    return Problem(first, tuple(steps))


def tell(problem: Problem, rng: random.Random) -> str:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    events = " ".join(rng.choice(PHRASES[operator]).format(name=name, n=n) for operator, n in problem.steps)
    return f"{name} has {problem.first} {thing}. {events} How many {thing} does {name} have now?"


def _tasks(seed: int, count: int, *, heldout: bool) -> Iterator[Task]:
    rng = random.Random(seed)
    kind = "heldout" if heldout else "train"
    for index in range(count):
        problem = draw_problem(rng, heldout=heldout)
        yield Task(
            id=f"{kind}-{index}",
            prompt=tell(problem, rng),
            answer=str(problem.values()[-1]),
            extra={"calls": len(problem.steps)},
        )


def train(seed: int) -> Iterator[Task]:
    return _tasks(seed, 4_000, heldout=False)


def heldout(seed: int) -> Iterator[Task]:
    return _tasks(seed + 1_000_003, 240, heldout=True)
