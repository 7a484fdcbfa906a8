"""The demo's world: a pocket calculator that does one operation at a time, and a dictionary nobody needs."""

import json
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


def as_text() -> str:
    """Everything about the environment that stands in a prompt, for the tokenizer to learn from."""
    schemas = [json.dumps(each.schema) for each in environment.tools]
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 2"}}\n</tool_call>'
    return "\n".join([SYSTEM, *schemas, call, call.replace("calculator", "dictionary").replace("expression", "word")])
