"""The executor: each kind of error, in one line, within its time; and what a tool cannot do to the process."""

import asyncio
import functools
import subprocess
import sys
import threading
import time

import pytest

from slipstream import Task, tool
from slipstream.errors import UserError
from slipstream.tools import Executor, Toolbox, ToolError, ToolFailed, ToolResult
from slipstream.usercall import TooManyStuck, UserCalls


@tool
def add(a: int, b: int = 1) -> int:
    """Add."""
    return a + b


@tool
async def later(text: str) -> str:
    """Say it later."""
    await asyncio.sleep(0)
    return text


@tool
def whoami() -> bool:
    """Whether this is the event loop's thread."""
    return threading.current_thread() is threading.main_thread()


async def call(executor: Executor, name: str, arguments: str) -> ToolResult:
    async with executor.session(Task(id="t", prompt="?")) as session:
        return await session.call(name, arguments)


def run(function, arguments="{}", seconds=5.0) -> ToolResult:
    return asyncio.run(call(Executor(Toolbox([function]), seconds), function.name, arguments))


def test_sync_and_async():
    assert run(add, '{"a": 1, "b": 2}') == ToolResult("3")
    assert run(add, '{"a": 1}') == ToolResult("2")
    assert run(later, '{"text": "x"}') == ToolResult("x")
    assert run(whoami) == ToolResult("false")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (2**80, str(2**80)),
        (None, "null"),
        (1.5, "1.5"),
        ({"é": [1, (2, 3)], 4: None}, '{"é": [1, [2, 3]], "4": null}'),
        ({1}, "[1]"),
        ("lone \ud800", "lone ?"),
        (["lone \ud800"], '["lone ?"]'),
        (object, "\"<class 'object'>\""),
    ],
)
def test_results_become_text(value, text):
    @tool
    def give() -> object:
        """Give."""
        return value

    assert run(give) == ToolResult(text)


def test_numpy_results_are_numbers():
    numpy = pytest.importorskip("numpy")

    @tool
    def give() -> object:
        """Give."""
        return {"one": numpy.float32(0.5), "many": numpy.arange(3)}

    assert run(give) == ToolResult('{"one": 0.5, "many": [0, 1, 2]}')


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("{}", "missing required field `a`"),
        ('{"a": "x"}', "Expected `int`, got `str`"),
        ('{"a": 1, "c": 2}', "unknown field `c`"),
        ('{"a": 1', "truncated"),
        ("[1]", "Expected `object`"),
        ('{"a": 1}{"a": 2}', "trailing"),
        ('{"a": ' + "[" * 100_000, ""),
        ('{"a": "\ud800"}', ""),
        ('{"a": ' + "9" * 5000 + "}", ""),
    ],
)
def test_bad_arguments(arguments, says):
    result = run(add, arguments)
    assert result.error is ToolError.BAD_ARGUMENTS
    assert result.text.startswith("Error: add: ")
    assert says in result.text


def test_unknown_tool():
    result = asyncio.run(call(Executor(Toolbox([add, later]), 1), "ad", "{}"))
    assert result == ToolResult("Error: there is no tool 'ad'; there are: add, later", ToolError.UNKNOWN_TOOL)


def nested() -> list:
    value: list = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (ValueError("two\n  lines"), "Error: two lines"),
        (ValueError(), "Error: ValueError"),
        (TimeoutError("the server is slow"), "Error: the server is slow"),
        (SystemExit(3), "Error: SystemExit: 3"),
        (KeyboardInterrupt(), "Error: KeyboardInterrupt:"),
        (asyncio.CancelledError(), None),
        (StopIteration(), None),
        (UnicodeError("\ud800"), "Error: ?"),
    ],
)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_a_tool_raises_is_shown(raised, text, kind):
    @tool
    def fail() -> str:
        """Fail."""
        raise raised

    @tool
    async def fail_async() -> str:
        """Fail."""
        raise raised

    result = run(fail if kind == "sync" else fail_async)
    assert result.error is ToolError.RAISED
    assert "\n" not in result.text
    if text is not None:
        assert result.text == text


def test_a_result_that_cannot_be_text_is_an_error():
    @tool
    def give() -> list:
        """Give."""
        return nested()

    assert run(give).error is ToolError.RAISED


def test_tool_failed_is_no_result():
    @tool
    def fail() -> str:
        """Fail."""
        raise ToolFailed("the sandbox is gone")

    with pytest.raises(ToolFailed, match="the sandbox is gone"):
        run(fail)


def test_an_async_function_behind_a_plain_decorator():
    def twice(function):
        @functools.wraps(function)
        def wrapped(text: str):
            return function(text + text)

        return wrapped

    @tool
    @twice
    async def say(text: str) -> str:
        """Say it."""
        return text

    assert run(say, '{"text": "x"}') == ToolResult("xx")


def test_two_tools_of_one_name():
    with pytest.raises(UserError, match="two tools are named 'add'"):
        Toolbox([add, add])


# -- time


async def test_stuck_tools_stop_neither_the_loop_nor_the_calls_after_them():
    release = threading.Event()

    @tool
    def hang() -> None:
        """Hang."""
        release.wait()

    executor = Executor(Toolbox([hang, add]), 0.1)
    began = time.monotonic()
    calls = [call(executor, "hang", "{}") for _ in range(40)]  # more than run at once
    results = await asyncio.gather(*calls, call(executor, "add", '{"a": 1}'))
    assert results[-1] == ToolResult("2")
    assert {(result.text, result.error) for result in results[:-1]} == {
        ("Error: hang did not end within 0.1 s", ToolError.TIMED_OUT)
    }
    assert await call(executor, "add", '{"a": 1}') == ToolResult("2")
    assert time.monotonic() - began < 5
    release.set()


async def test_calls_wait_for_their_turn_without_spending_their_time():
    running, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1

    calls = UserCalls(at_once=3)
    await asyncio.gather(*(calls.call(work, {}, 1.0) for _ in range(12)))
    assert most == 3


async def test_too_many_stuck_threads_are_the_infrastructures_fault():
    release = threading.Event()
    calls = UserCalls(most_stuck=2)
    for _ in range(2):
        with pytest.raises(Exception, match=r"^$"):
            await calls.call(release.wait, {}, 0.01)
    with pytest.raises(TooManyStuck, match="2 calls"):
        await calls.call(release.wait, {}, 0.01)
    release.set()
    while True:  # once the threads have ended, calls are taken again
        try:
            assert await calls.call(release.wait, {}, 1.0)
            break
        except TooManyStuck:
            await asyncio.sleep(0.01)


def test_a_stuck_thread_does_not_keep_the_process():
    program = """
import asyncio, threading
from slipstream import Task, tool
from slipstream.tools import Executor, Toolbox
@tool
def hang() -> None:
    "Hang."
    threading.Event().wait()
async def main():
    async with Executor(Toolbox([hang]), 0.1).session(Task(id="t", prompt="?")) as session:
        print((await session.call("hang", "{}")).error)
asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "timed_out\n", "")
