"""Tools with state: one object per trajectory, calls in order, and a teardown that always runs."""

import asyncio
import functools
import threading
from typing import ClassVar

import pytest

from slipstream import Task, tool
from slipstream.errors import UserError
from slipstream.tools import Executor, Toolbox, ToolError, ToolFailed, ToolResult, ToolSet

TASK = Task(id="t", prompt="?")


class Counter(ToolSet):
    """Remembers what happened to all of its kind."""

    events: ClassVar[list[str]] = []

    def __init__(self, start: int = 0) -> None:
        self.count = start

    async def setup(self, task: Task) -> None:
        self.events.append(f"setup {task.id}")

    async def teardown(self) -> None:
        self.events.append(f"teardown {self.count}")

    @tool
    async def add(self, number: int) -> int:
        """Add to the count.

        Args:
            number: how much
        """
        before = self.count
        await asyncio.sleep(0.01)
        self.count = before + number
        return self.count

    @tool
    def count_now(self) -> int:
        """The count."""
        return self.count


@pytest.fixture(autouse=True)
def events():
    Counter.events.clear()
    return Counter.events


def executor(*tools, seconds=5.0) -> Executor:
    return Executor(Toolbox(tools), seconds)


async def test_each_trajectory_has_its_own_state(events):
    shared = executor(Counter)

    async def trajectory(number: int) -> str:
        async with shared.session(TASK) as session:
            for _ in range(3):
                await session.call("add", f'{{"number": {number}}}')
            return (await session.call("count_now", "{}")).text

    assert await asyncio.gather(*(trajectory(number) for number in (1, 10, 100))) == ["3", "30", "300"]
    assert sorted(events) == ["setup t"] * 3 + ["teardown 3", "teardown 30", "teardown 300"]


async def test_parallel_calls_of_a_trajectory_run_one_after_the_other():
    async with executor(Counter).session(TASK) as session:
        results = await asyncio.gather(*(session.call("add", '{"number": 1}') for _ in range(5)))
    assert [result.text for result in results] == ["1", "2", "3", "4", "5"]


async def test_who_calls_nothing_sets_nothing_up(events):
    async with executor(Counter).session(TASK):
        pass
    assert events == []


async def test_arguments_of_the_class_are_bound_with_partial():
    async with executor(functools.partial(Counter, 7)).session(TASK) as session:
        assert await session.call("count_now", "{}") == ToolResult("7")


async def test_the_schema_and_bad_calls_are_as_with_functions():
    box = Toolbox([Counter])
    assert list(box.tools) == ["add", "count_now"]
    assert box.tools["add"].schema["parameters"] == {
        "type": "object",
        "properties": {"number": {"type": "integer", "description": "how much"}},
        "required": ["number"],
    }
    async with Executor(box, 5).session(TASK) as session:
        assert (await session.call("add", '{"number": "x"}')).error is ToolError.BAD_ARGUMENTS
        assert (await session.call("add", '{"self": 1, "number": 1}')).error is ToolError.BAD_ARGUMENTS
        assert session.made == {}


async def test_a_method_is_still_a_method():
    assert await Counter(3).add(number=4) == 7


async def test_teardown_runs_when_the_trajectory_is_cancelled(events):
    called = asyncio.Event()

    async def trajectory() -> None:
        async with executor(Counter).session(TASK) as session:
            await session.call("add", '{"number": 5}')
            called.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(trajectory())
    await called.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert events == ["setup t", "teardown 5"]


async def test_teardown_ends_although_it_is_cancelled_twice():
    began, release, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Slow(Counter):
        async def teardown(self) -> None:
            began.set()
            await release.wait()
            ended.set()

    async def trajectory() -> None:
        async with shared.session(TASK) as session:
            await session.call("count_now", "{}")

    shared = executor(Slow)
    task = asyncio.create_task(trajectory())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    await asyncio.wait_for(ended.wait(), 5)


async def test_a_teardown_that_raises_or_hangs_keeps_none_of_the_others(events, caplog):
    class Raises(ToolSet):
        async def teardown(self) -> None:
            raise ValueError("still open")

        @tool
        def one(self) -> None:
            """One."""

    class Hangs(ToolSet):
        async def teardown(self) -> None:
            await asyncio.Event().wait()

        @tool
        def two(self) -> None:
            """Two."""

    async with executor(Raises, Hangs, Counter, seconds=0.2).session(TASK) as session:
        for name in ("one", "two", "count_now"):
            await session.call(name, "{}")
    assert events == ["setup t", "teardown 0"]
    assert "Raises.teardown raised" in caplog.text
    assert "still open" in caplog.text
    assert "Hangs.teardown did not end within 0.2 s" in caplog.text


@pytest.mark.parametrize("way", ["raises", "hangs"])
async def test_a_setup_that_fails_is_the_infrastructures_fault_and_torn_down(events, way):
    class Broken(Counter):
        async def setup(self, task: Task) -> None:
            if way == "raises":
                raise OSError("no route to the database")
            await asyncio.Event().wait()

    async with executor(Broken, seconds=0.2).session(TASK) as session:
        with pytest.raises(ToolFailed, match=r"Broken\.setup (raised OSError: no route|did not end within 0.2 s)"):
            await session.call("count_now", "{}")
    assert events == ["teardown 0"]


# -- limits and retries of a tool


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_at_once_is_over_all_trajectories_and_costs_no_time_of_a_call(kind):
    running, most, lock = 0, 0, threading.Lock()

    def enter(change: int) -> None:
        nonlocal running, most
        with lock:
            running += change
            most = max(most, running)

    @tool(at_once=2)
    async def work() -> None:
        """Work."""
        enter(1)
        await asyncio.sleep(0.1)
        enter(-1)

    pause = threading.Event()

    @tool(at_once=2)
    def work_in_threads() -> None:
        """Work."""
        enter(1)
        pause.wait(0.1)
        enter(-1)

    each = work if kind == "async" else work_in_threads
    shared = executor(each, seconds=0.4)

    async def trajectory() -> ToolResult:
        async with shared.session(TASK) as session:
            return await session.call(each.name, "{}")

    results = await asyncio.gather(
        *(trajectory() for _ in range(12))
    )  # 0.6 s in all: the last wait for longer than 0.4
    assert {result.error for result in results} == {None}
    assert most == 2


async def test_retries_only_where_the_tool_says_so():
    tries: list[str] = []

    def flaky(name: str, **options):
        def run() -> str:
            """Run."""
            tries.append(name)
            if tries.count(name) < 3:
                raise OSError("try again")
            return "ran"

        run.__name__ = name
        return tool(**options)(run)

    async with executor(flaky("never"), flaky("once", retries=1), flaky("twice", retries=2)).session(TASK) as session:
        assert (await session.call("never", "{}")).error is ToolError.RAISED
        assert (await session.call("once", "{}")).error is ToolError.RAISED
        assert await session.call("twice", "{}") == ToolResult("ran")
    assert tries == ["never", "once", "once", "twice", "twice", "twice"]


# -- refused at the door


class Empty(ToolSet):
    def look(self) -> None:
        """Not a tool."""


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ([Counter.add], "add is a method; put its class among the tools"),
        ([Empty], "Empty has no tools"),
        ([Counter, Counter], "two tools are named 'add'"),
        ([Counter(1)], "is no tool; put @tool before the function"),
        ([lambda: Counter(1)], "is no tool; put @tool before the function"),
        ([int], "is no tool"),
    ],
)
def test_refused(tools, says):
    with pytest.raises(UserError, match=says):
        Toolbox(tools)


def test_limits_that_are_no_counts_are_refused():
    with pytest.raises(UserError, match="at_once = -1"):

        @tool(at_once=-1)
        def look() -> None:
            """Look."""
