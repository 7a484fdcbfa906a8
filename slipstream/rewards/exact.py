"""Exact match: the whole last turn is the answer, but for case and white space."""

from slipstream.rewards.reward import reward
from slipstream.task import Task


@reward
def exact_match(answer: str, task: Task) -> bool:
    """1 when the last turn says exactly the task's answer."""
    return " ".join(answer.split()).casefold() == " ".join(task.answer.split()).casefold()
