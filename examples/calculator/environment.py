"""The demo's world: a pocket calculator that does one operation at a time, and a dictionary nobody needs."""

import operator
import re

from slipstream import Environment, tool
from slipstream.rewards import exact_match

SYSTEM = "Solve the task. Use tools. Answer with the number alone."
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
EXPRESSION = re.compile(r"\s*(-?\d{1,12})\s*([-+*])\s*(-?\d{1,12})\s*")


def compute(expression: str) -> int:
    """Raises ValueError, with words the model can learn from."""
    match = EXPRESSION.fullmatch(expression)
    if match is None:
        raise ValueError("write one operation on two whole numbers, such as 12 * 34")
    left, sign, right = match.groups()
    return OPERATIONS[sign](int(left), int(right))


def define(word: str) -> str:
    return f"{word}: a word"


@tool
def calculator(expression: str) -> int:
    """One operation on two whole numbers."""
    return compute(expression)


@tool
def dictionary(word: str) -> str:
    """What a word means."""
    return define(word)


environment = Environment(system=SYSTEM, tools=[calculator, dictionary], rewards=[exact_match])
