"""What is counted of a tool's calls, and how many run side by side over all tools."""

import asyncio
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import Task, tool
from slipstream.tools import Executor, Toolbox, ToolFailed
from slipstream.tooluse import STEP, ToolUse, together

TASK = Task(id="t", prompt="?")


def use(name: str, seconds: list[float]) -> ToolUse:
    made = ToolUse(name=name)
    for each in seconds:
        made.add(each, error=False)
    return made


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(1e-5, 1e4), min_size=1), st.floats(0.01, 1.0), st.integers(0, 30))
def test_counts_of_several_processes_add_up_and_times_are_known_to_a_tenth(seconds, share, split):
    (both,) = together([use("a", seconds[:split]), use("a", seconds[split:])])
    assert both == use("a", seconds)
    true = sorted(seconds)[math.ceil(share * len(seconds)) - 1]
    assert true / STEP**0.51 <= both.quantile(share) <= true * STEP**0.51
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(both), type=ToolUse) == both


def test_nothing_called_is_no_time_and_no_extreme_is_out_of_bounds():
    assert math.isnan(ToolUse(name="a").quantile(0.5))
    edge = use("a", [0.0, 1e9])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(edge), type=ToolUse) == edge
    assert [each.name for each in together([use("b", []), use("a", [])])] == ["a", "b"]


@tool(retries=1)
async def ask(how: str) -> str:
    """Ask."""
    if how == "hang":
        await asyncio.Event().wait()
    if how == "break":
        raise ToolFailed("gone")
    if how == "raise":
        raise ValueError("no")
    return how


async def test_each_call_counts_once_with_its_retries_and_however_it_ends():
    executor = Executor(Toolbox([ask]), 0.05)
    async with executor.session(TASK) as session:
        for arguments in ('{"how": "well"}', '{"how": "raise"}', '{"how": "hang"}', '{"hw": 1}', "{"):
            await session.call("ask", arguments)
        with pytest.raises(ToolFailed):
            await session.call("ask", '{"how": "break"}')
        await session.call("nobody", "{}")
        given_up = asyncio.ensure_future(session.call("ask", '{"how": "hang"}'))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait({given_up})
    counted = executor.use["ask"]
    assert (counted.calls, counted.errors, sum(counted.seconds.values())) == (7, 6, 5)
    assert counted.quantile(0.99) > 0.09  # what hung was tried twice


async def test_the_limit_over_all_tools_holds_and_a_tools_own_queue_keeps_nobody_else():
    running: list[str] = []
    most = 0
    full, free = asyncio.Event(), asyncio.Event()

    async def work(name: str) -> str:
        nonlocal most
        running.append(name)
        if len(running) == 2:
            full.set()
        most = max(most, len(running))
        await free.wait()
        running.remove(name)
        return name

    @tool(at_once=1)
    async def narrow() -> str:
        """One at a time."""
        return await work("narrow")

    @tool
    async def wide() -> str:
        """Many."""
        return await work("wide")

    executor = Executor(Toolbox([narrow, wide]), 5, at_once=2)
    async with executor.session(TASK) as session:
        calls = [asyncio.ensure_future(session.call(name, "{}")) for name in ["narrow"] * 3 + ["wide"] * 3]
        await full.wait()
        assert sorted(running) == ["narrow", "wide"]  # the other narrow ones hold no slot while they wait
        free.set()
        assert [result.text for result in await asyncio.gather(*calls)] == ["narrow"] * 3 + ["wide"] * 3
    assert most == 2
