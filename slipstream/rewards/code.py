"""Whether the program that a model wrote passes a task's tests.

Invariant: the verdict comes from a process that never runs the model's code, and the code's process never holds what
the tests expect. What the code cannot do is 0; what is wrong with the tests or the machine is raised, and never a 0.

`task.extra["tests"]` is Python (asserts, `test_` functions, TestCases, or `check(candidate)` with `entry_point` beside
it), or `{"inputs": [...], "outputs": [...]}`: of a program's stdin and stdout, or, with `"fn_name"`, of a function's
arguments (JSON, one a line) and its value.
"""

import re
import socket
from typing import Any

import msgspec

from slipstream.rewards.reward import Reward, reward
from slipstream.task import Task
from slipstream.tools.sandbox import How, Limits, Output, Sandbox, opened, source, until_over

MODEL, TESTER = source(__file__, "inside_model.py"), source(__file__, "inside_tester.py")
STANDARD = Limits(seconds=10, cpu_seconds=10)
FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


class Pairs(msgspec.Struct, frozen=True):
    """What goes in and must come out."""

    inputs: list[Any]
    outputs: list[Any]
    fn_name: str | None = None


class Verdict(msgspec.Struct, frozen=True):
    passed: bool = False
    why: str = ""
    broken: str = ""


def code(limits: Limits = STANDARD, *, packages: bool = False, name: str = "code") -> Reward:
    """1 when the last fenced block of the answer (the whole answer, where there is none) passes all of the tests.

    `packages`: programs may import what is installed, and not the standard library alone.
    """
    sandbox = Sandbox(limits, packages=packages)

    async def passes(answer: str, task: Task) -> bool:
        return (await judge(sandbox, program_of(answer), task)).passed

    passes.__name__ = name
    return reward(passes)


def program_of(answer: str) -> str:
    blocks = FENCED.findall(answer)
    return blocks[-1] if blocks else answer


async def judge(sandbox: Sandbox, program: str, task: Task) -> Verdict:
    """Raises ValueError when the tests are no tests, RuntimeError when they could not be run."""
    tests = task.extra.get("tests")
    if isinstance(tests, str):
        return await _by_tests(sandbox, program, tests, str(task.extra.get("entry_point", "")))
    try:
        pairs = msgspec.convert(tests, Pairs)
    except msgspec.ValidationError as error:
        raise ValueError(f'task {task.id}: "tests" is neither Python nor inputs and outputs: {error}') from error
    if not pairs.inputs or len(pairs.inputs) != len(pairs.outputs):
        raise ValueError(f"task {task.id}: {len(pairs.inputs)} inputs and {len(pairs.outputs)} outputs")
    if pairs.fn_name:
        return await _by_tests(sandbox, program, as_python(pairs, pairs.fn_name), "")
    return await _by_output(sandbox, program, pairs)


async def _by_output(sandbox: Sandbox, program: str, pairs: Pairs) -> Verdict:
    for given, expected in zip(pairs.inputs, pairs.outputs, strict=True):
        ran = await sandbox.run(program, stdin=str(given), errors=False)
        if ran.how is not How.EXITED or ran.code:
            return Verdict(why=f"it {ran.how} with code {ran.code}")
        if _lines(ran.output) != _lines(str(expected)):
            return Verdict(why="it printed something else")
    return Verdict(passed=True)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def as_python(pairs: Pairs, function: str) -> str:
    """Inputs and outputs of a function as asserts. A tuple passes for a list: JSON has no tuples."""
    if not function.isidentifier():
        raise ValueError(f'"fn_name" is {function!r}, which is no name')
    lists = "def lists_(v):\n    return [lists_(each) for each in v] if isinstance(v, (list, tuple)) else v\n"
    asserts = [
        f"assert lists_({function}(*{_arguments(given)!r})) == {_json(expected)!r}"
        for given, expected in zip(pairs.inputs, pairs.outputs, strict=True)
    ]
    return lists + "\n".join(asserts)


def _arguments(given: Any) -> list[Any]:
    return [_json(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else list(given)


def _json(text: Any) -> Any:
    return msgspec.json.decode(text) if isinstance(text, str) else text


async def _by_tests(sandbox: Sandbox, program: str, tests: str, entry_point: str) -> Verdict:
    models, testers = socket.socketpair()
    async with sandbox.slots:
        with models, testers, opened(Output(1 << 16)) as output:
            async with (
                sandbox.process(
                    MODEL,
                    name="solution",
                    arguments={"channel": models.fileno(), "code": program},
                    descriptors=(models.fileno(),),
                ),
                sandbox.process(
                    TESTER,
                    name="tester",
                    arguments={
                        "channel": testers.fileno(),
                        "tests": tests,
                        "entry_point": entry_point,
                        "verdict": output.writing,
                    },
                    descriptors=(testers.fileno(), output.writing),
                ) as tester,
            ):
                models.close()
                testers.close()
                how = await until_over(tester.wait(), output, sandbox.limits.seconds)
                ended = tester.returncode
            said = output.take()
    if how is How.TIMED_OUT:
        return Verdict(why=f"it took more than {sandbox.limits.seconds:g} s")
    try:
        verdict = msgspec.json.decode(said, type=Verdict)
    except msgspec.DecodeError:
        raise RuntimeError(f"the tests {how} with code {ended}, and without a verdict") from None
    if verdict.broken:
        raise ValueError(verdict.broken)
    return verdict
