"""Python as a tool: what the model is shown."""

import pytest

from slipstream import Task
from slipstream.tools import Executor, Toolbox, ToolResult, python_interpreter, python_program
from slipstream.tools.python import shown
from slipstream.tools.sandbox import How, Limits, Ran

TASK = Task(id="t", prompt="?")


async def test_programs_forget_and_interpreters_remember():
    for made, second in ((python_program(), "NameError"), (python_interpreter(), "4")):
        async with Executor(Toolbox([made]), 10).session(TASK) as session:
            assert await session.call("python", '{"code": "x = 3"}') == ToolResult("[nothing was printed]")
            assert second in (await session.call("python", '{"code": "print(x + 1)"}')).text


async def test_trajectories_share_no_interpreter():
    executor = Executor(Toolbox([python_interpreter()]), 10)
    async with executor.session(TASK) as one, executor.session(TASK) as other:
        await one.call("python", '{"code": "x = 3"}')
        assert "NameError" in (await other.call("python", '{"code": "x"}')).text


@pytest.mark.parametrize(
    ("ran", "text"),
    [
        (Ran("4\n", How.EXITED), "4\n"),
        (Ran("", How.EXITED), "[nothing was printed]"),
        (Ran("Traceback", How.EXITED, 1), "Traceback"),
        (Ran("4\n", How.TIMED_OUT, -9), "4\n[it was ended after 5 s]"),
        (Ran("444", How.FLOODED, -9), "444[it was ended after printing 262144 bytes]"),
        (Ran("", How.EXITED, -9), "[it was ended by signal 9; it may use 5 s and 512 MB]"),
        (
            Ran("", How.EXITED, lost=True),
            "[the interpreter is gone and its variables with it; the next call starts a new one]",
        ),
    ],
)
def test_shown(ran, text):
    assert shown(ran, Limits()) == text
