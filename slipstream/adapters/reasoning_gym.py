"""Tasks and verdicts of reasoning-gym (PyPI, the extra `reasoning-gym`): over a hundred generators of puzzles.

Invariant: a task names its instance (seed and number), and the reward makes that very instance anew: no answer travels
that the generator would not give, whatever Python values its verdict looks at.
"""

import functools
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from slipstream.errors import UserError
from slipstream.rewards import Reward, reward
from slipstream.task import Task

ANSWER_FORMAT = "Think step by step. Then give the final answer alone between <answer> and </answer>."


class ReasoningGym:
    """One generator with its settings: `tasks` for the config's `tasks.train`, `reward` and `system` for an
    Environment.

    The reward is the generator's own verdict, 0 to 1, on what stands in the last `<answer>` of the last turn, or on the
    whole turn where there is none.
    """

    system = ANSWER_FORMAT

    def __init__(self, name: str, *, size: int = 500, **settings: Any) -> None:
        """`settings`: the generator's own. Raises UserError for a name or a setting that it does not know."""
        if size < 1:
            raise UserError(f"ReasoningGym({name!r}, size={size}): write how many tasks, 1 or more")
        self.name, self.size, self._settings = name, size, settings
        self.dataset = functools.lru_cache(maxsize=4)(self._made)  # by seed
        self.dataset(0)
        self.reward: Reward = reward(self._verdict())

    def _made(self, seed: int) -> Any:
        try:
            gym: Any = import_module("reasoning_gym")
        except ImportError as error:
            raise UserError("ReasoningGym needs the package reasoning-gym: pip install reasoning-gym") from error
        try:
            return gym.create_dataset(self.name, size=self.size, seed=seed, **self._settings)
        except (ValueError, TypeError, AssertionError) as error:
            raise UserError(f"ReasoningGym({self.name!r}, ...): {error}; see reasoning-gym's gallery") from error

    def tasks(self, seed: int) -> Iterator[dict[str, Any]]:
        """Rows; another seed gives others, as held-out tasks want."""
        dataset = self.dataset(seed)
        for number in range(self.size):
            entry = dataset[number]
            yield {
                "id": f"{self.name}/{seed}/{number}",
                "prompt": entry["question"],
                "answer": entry["answer"] or "",
                "data_source": f"reasoning_gym/{self.name}",
                "gym_seed": seed,
                "gym_number": number,
            }

    def _verdict(self) -> Any:
        def solved(answer: str, task: Task) -> float:
            dataset = self.dataset(task.extra["gym_seed"])
            extract: Any = import_module("reasoning_gym.utils").extract_answer
            given = extract(answer)
            return float(dataset.score_answer(answer.strip() if given is None else given, dataset[_number(task)]))

        return solved


def _number(task: Task) -> int:
    return int(task.extra["gym_number"])
