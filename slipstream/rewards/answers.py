"""Rewards for a short answer: GSM8K's number, and what search tasks ask for.

Invariant: only what is marked as the answer counts, and of several the last; nothing is fished out of the text around.
"""

import re
from collections import Counter
from decimal import Decimal, InvalidOperation

from slipstream.rewards.reward import reward
from slipstream.task import Task

_HASHES = re.compile(r"####\s*([^\n]*)")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = re.compile(r"[^\w\s]|_")


@reward
def gsm8k(answer: str, task: Task) -> bool:
    """1 when the last `#### NUMBER` is that of the task, whose answer may be the dataset's whole solution."""
    wanted = number(_last_marked(task.answer) or task.answer)
    if wanted is None:
        raise ValueError(f"task {task.id}: the answer {task.answer!r} is no number")
    said = _last_marked(answer)
    return said is not None and number(said) == wanted


def _last_marked(text: str) -> str | None:
    marked = _HASHES.findall(text)
    return marked[-1] if marked else None


def number(text: str) -> Decimal | None:
    """A whole text as a number; thousands' commas, a dollar sign and a last full stop are allowed."""
    plain = text.strip().removeprefix("$").removesuffix(".")
    if re.fullmatch(r"-?\$?\d{1,3}(,\d{3})+(\.\d+)?", plain):
        plain = plain.replace(",", "")
    try:
        found = Decimal(plain.replace("$", "", 1))
    except InvalidOperation:
        return None
    return found if found.is_finite() else None


@reward
def search_exact(answer: str, task: Task) -> bool:
    """1 when the answer is one of the task's, but for case, articles and punctuation (as SQuAD compares)."""
    said = " ".join(words(marked(answer)))
    return any(said == " ".join(words(each)) for each in golds(task))


@reward
def search_f1(answer: str, task: Task) -> float:
    """Overlap in words with the nearest of the task's answers (SQuAD's F1)."""
    return max(f1(words(marked(answer)), words(each)) for each in golds(task))


def marked(answer: str) -> str:
    """The last <answer>, or the whole turn where there is none."""
    found = _TAGGED.findall(answer)
    return found[-1] if found else answer


def golds(task: Task) -> list[str]:
    """`answers` beside the task, or its one answer."""
    several = task.extra.get("answers")
    if several is None:
        several = [task.answer]
    if not isinstance(several, list) or not all(isinstance(each, str) and each.strip() for each in several):
        raise ValueError(f"task {task.id}: no answers to compare with (answer, or a list of texts in answers)")
    return list[str](several)


def words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", _PUNCTUATION.sub("", text.casefold())).split()


def f1(said: list[str], wanted: list[str]) -> float:
    same = sum((Counter(said) & Counter(wanted)).values())
    return 2 * same / (len(said) + len(wanted)) if same else float(said == wanted)
