"""A trajectory that is parked in one loop and gone on with in another is one stream, and no worse for it."""

import asyncio
from typing import Any

import msgspec
import pytest

from slipstream import AgentLoop, Environment, reward, tool
from slipstream.agent_loop.parking import CannotGoOn
from slipstream.config import RolloutSection
from slipstream.queue import decode, encode
from slipstream.queue.wire import trajectory as made
from slipstream.task import Task
from slipstream.tools import ToolSet
from slipstream.trajectory import Outcome, Trajectory

CALL = '<tool_call>\n{"name": "step", "arguments": {}}\n</tool_call>'


class Steps(ToolSet):
    def __init__(self) -> None:
        self.steps = 0

    @tool
    def step(self) -> int:
        """Go one step."""
        self.steps += 1
        return self.steps

    def save(self) -> bytes | None:
        return b"%d" % self.steps

    def restore(self, state: bytes) -> None:
        self.steps = int(state)


class Unsaved(Steps):
    def save(self) -> bytes | None:
        return None


class Broken(Steps):
    def restore(self, state: bytes) -> None:
        raise ValueError("not this one")


@reward
def nothing() -> float:
    return 1.0


class Parked(list[Trajectory]):
    def loop(self, renderer: Any, sampler: Any, limits: RolloutSection, tools: type[ToolSet] = Steps) -> AgentLoop:
        return AgentLoop(Environment(tools=[tools], rewards=[nothing]), renderer, sampler, limits, on_park=self.append)


async def run(loop: AgentLoop, parked: Trajectory | None = None) -> Trajectory:
    task = Task(id="t", prompt="Walk.")
    return await loop.run(lease=7, group=3, task=task, attempt=1, seed=11, t_leased=1.0, parked=parked)


def over_the_wire(parked: Trajectory) -> Trajectory:
    return made(decode(encode([parked])))


@pytest.fixture
def eager(limits: RolloutSection) -> RolloutSection:
    """Parks after each turn."""
    return msgspec.structs.replace(limits, park_seconds=1e-9)


async def test_another_goes_on_with_the_same_stream(renderer: Any, script: Any, eager: RolloutSection) -> None:
    parked = Parked()
    whole = await run(parked.loop(renderer, script(CALL, CALL, "done"), eager))
    assert [p.turns for p in parked] == [1, 2]
    assert all(p.outcome is Outcome.CANCELLED for p in parked)
    for at, left in ((0, (CALL, "done")), (1, ("done",))):
        sampler = script(*left)
        other = await run(Parked().loop(renderer, sampler, eager), over_the_wire(parked[at]))
        begun = len(parked[at].token_ids)
        assert sampler.requests[0].prompt == parked[at].token_ids == other.token_ids[:begun] == whole.token_ids[:begun]
        assert other.logprobs[:begun] == parked[at].logprobs
        assert other.version_runs[: len(parked[at].version_runs) - 1] == parked[at].version_runs[:-1]
        messages = [msgspec.json.decode(t.detail or b"")["messages"] for t in (other, whole)]
        assert messages[0] == messages[1]  # the tool counted on
        assert (other.turns, other.tool_calls, other.outcome, other.reward) == (3, 2, Outcome.FINISHED, 1.0)
        assert sum(span.length for span in other.spans) == len(other.token_ids)


async def test_the_time_that_was_spent_is_spent(renderer: Any, script: Any, eager: RolloutSection) -> None:
    parked = Parked()
    await run(parked.loop(renderer, script(CALL), eager))
    state = msgspec.json.decode(parked[0].detail or b"")
    parked[0].detail = msgspec.json.encode({**state, "seconds": 29.9999 + 1})
    other = await run(Parked().loop(renderer, script(), eager), parked[0])
    assert (other.outcome, other.turns) == (Outcome.TIMEOUT, 1)
    assert other.token_ids == parked[0].token_ids


async def test_what_cannot_be_saved_or_is_young_is_not_parked(
    renderer: Any, script: Any, eager: RolloutSection, limits: RolloutSection
) -> None:
    for tools, seconds in ((Unsaved, 1e-9), (Steps, 60.0), (Steps, 0.0)):
        parked = Parked()
        one = msgspec.structs.replace(limits, park_seconds=seconds)
        assert (await run(parked.loop(renderer, script(CALL), one, tools))).outcome is Outcome.FINISHED
        assert parked == []


async def test_what_is_no_use_is_refused_before_anything_is_sampled(
    renderer: Any, script: Any, eager: RolloutSection
) -> None:
    parked, sampler = Parked(), script()
    await run(parked.loop(renderer, script(CALL), eager))
    with pytest.raises(CannotGoOn, match="there is no ToolSet Steps here"):
        await run(Parked().loop(renderer, sampler, eager, Unsaved), parked[0])
    Broken.__name__ = "Steps"
    with pytest.raises(CannotGoOn, match="restore: ValueError: not this one"):
        await run(Parked().loop(renderer, sampler, eager, Broken), parked[0])
    parked[0].detail = b"{"
    with pytest.raises(CannotGoOn, match="cannot be read"):
        await run(Parked().loop(renderer, sampler, eager), parked[0])
    assert sampler.requests == []
    assert asyncio.all_tasks() == {asyncio.current_task()}
