"""The rollouter without an engine or a queue: what its time goes to, what its log says, where its leases end."""

import asyncio
import logging
import re
import signal
import sys
import time
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.agent_loop.sampler import EngineFailed, Finish, Sample, SampleRequest
from slipstream.config import Config
from slipstream.configfile import read_config
from slipstream.observe.clock import Clock
from slipstream.queue.messages import Accepted, Granted, Lease, Newest, RollouterBeat, Weights
from slipstream.rollouter.activity import NAMES, Stage, part
from slipstream.rollouter.engine import Engine
from slipstream.rollouter.failures import MOST_KINDS
from slipstream.rollouter.process import Rollouter
from slipstream.task import Task
from slipstream.trajectory import Outcome, Trajectory, VersionRun

DEADLINE = 20.0
ENVIRONMENT = """
import asyncio
from slipstream import Environment, reward, tool

tools, rewards = asyncio.Event(), asyncio.Event()
problem = ""

@tool
async def look(at: str) -> str:
    '''Look at something.'''
    await tools.wait()
    return at

@reward
async def right(answer) -> float:
    await rewards.wait()
    if problem:
        raise ValueError(f"{problem} in {answer}")
    return 1.0

environment = Environment(tools=[look], rewards=[right])
"""
CALL = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'


class StandIn(Engine):
    """Counts as the real one does; a test answers its requests."""

    def __init__(self) -> None:
        super().__init__(None, 2048, "keep")
        self.asked: list[tuple[SampleRequest, asyncio.Future[Sample]]] = []
        self.gone = False

    @property
    def dead(self) -> bool:
        return self.gone

    async def _sample(self, request: SampleRequest, started: float) -> Sample:
        if self.gone:
            raise EngineFailed("gone")
        future: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        self.asked.append((request, future))
        return await future

    async def load(self, weights: Weights) -> float:
        self.version = weights.version
        return 1.0


class Queue:
    """A client that hands out what a test puts in, and keeps what comes back."""

    def __init__(self) -> None:
        self.leases: asyncio.Queue[list[Lease]] = asyncio.Queue()
        self.versions: asyncio.Queue[int] = asyncio.Queue()
        self.takes = asyncio.Event()  # deliveries wait for it
        self.takes.set()
        self.delivered: list[Trajectory] = []
        self.late: list[int] = []
        self.given_back: list[int] = []
        self.beats: list[RollouterBeat] = []
        self.give_up_after = 0.0

    async def ask(self, room: int, wait_s: float) -> Granted:
        return Granted(leases=await self.leases.get(), why="staleness.depth")

    async def weights(self, newer_than: int, wait_s: float) -> Newest:
        return Newest(weights=Weights(version=await self.versions.get(), location="", checksum="", tensors=[]))

    async def deliver(self, trajectory: Trajectory) -> Accepted:
        await self.takes.wait()
        self.delivered.append(trajectory)
        late = [trajectory.lease] if trajectory.lease in self.late else []
        return Accepted(leases=[] if late else [trajectory.lease], duplicates=late)

    async def give_back(self, leases: list[int], reason: str) -> None:
        self.given_back += leases

    async def beat(self, beat: RollouterBeat) -> None:
        self.beats.append(beat)


class World:
    """A rollouter that serves, and everything around it."""

    def __init__(self, config: Config) -> None:
        self.engine, self.queue, self.seconds = StandIn(), Queue(), 0.0
        self.clock = Clock("r", "starting", now=lambda: self.seconds)
        client: Any = self.queue
        self.rollouter = Rollouter(config, self.engine, client, self.clock, "r")
        self.module: Any = sys.modules[f"slipstream_user.{config.environment.path.partition(':')[0]}"]
        self.exit: asyncio.Task[int] = asyncio.create_task(self.rollouter.serve())

    async def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert not self.exit.done() or self.exit.result(), "the rollouter left"
            assert time.monotonic() < deadline, self.clock.reading()
            await asyncio.sleep(0.001)

    async def spend(self, seconds: float, now: str) -> None:
        """Let that much time pass in the part `now`."""
        await self.until(lambda: self.clock.reading().now == now)
        self.seconds += seconds

    async def grant(self, *leases: int, min_version: int = 0) -> None:
        await self.queue.leases.put([lease(number, min_version) for number in leases])

    async def say(self, text: str, index: int = 0) -> None:
        await self.until(lambda: len(self.engine.asked) > index)
        _, future = self.engine.asked.pop(index)
        tokens = array("i", self.rollouter._agents.renderer.encode(text + "<|im_end|>"))
        future.set_result(
            Sample(
                token_ids=tokens,
                logprobs=array("f", [-1.0] * len(tokens)),
                version_runs=[VersionRun(len(tokens), self.engine.version)],
                finish=Finish.STOP,
                t_first_token=1.0,
                seconds=0.0,
            )
        )


def lease(number: int, min_version: int = 0) -> Lease:
    task = Task(id=f"task {number}", prompt="?")
    return Lease(
        lease=number, group=1, member=0, attempt=0, task=task, seed=number, min_version=min_version, deadline_s=60
    )


@pytest.fixture
def served(models: Path, tmp_path: Path) -> Any:
    (tmp_path / "environment.py").write_text(ENVIRONMENT)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "?"}')
    (tmp_path / "config.toml").write_text(
        f'[model]\npath = "{models}/stable"\n[environment]\npath = "environment.py:environment"\n'
        '[tasks]\ntrain = "tasks.jsonl"\n[rollout]\nconcurrency = 4\n'
    )
    config = read_config(tmp_path / "config.toml")

    @asynccontextmanager
    async def serving(version: int | None = 0) -> AsyncGenerator[World]:
        world = World(config)
        if version is not None:
            await world.queue.versions.put(version)
        try:
            yield world
        finally:
            world.exit.cancel()
            await asyncio.wait([world.exit])

    return serving


# -- the clock -----------------------------------------------------------------------------------------------------


async def test_every_second_is_in_the_part_that_it_was_spent_in(served: Any) -> None:
    async with served(version=None) as world:
        await world.spend(1, "starting")
        await world.queue.versions.put(0)
        await world.spend(2, "no lease")
        await world.grant(1)
        await world.spend(4, "generating")
        await world.say(CALL)
        await world.spend(8, "waiting for tools")
        world.module.tools.set()
        await world.spend(16, "generating")
        world.queue.takes.clear()
        await world.say("Done.")
        await world.spend(32, "agents and rewards")
        world.module.rewards.set()
        await world.spend(64, "delivering")
        world.queue.takes.set()
        await world.spend(128, "no lease")
        await world.grant(2, min_version=1)
        await world.spend(256, "waiting for weights")
        assert world.clock.reading().why == "1 of 1 trajectories wait for weights that their lease asks for"
        await world.queue.versions.put(1)
        await world.until(lambda: world.engine.asked)
        assert world.clock.reading().parts == {
            "starting": 1,
            "no lease": 2 + 128,
            "generating": 4 + 16,
            "waiting for tools": 8,
            "agents and rewards": 32,
            "delivering": 64,
            "waiting for weights": 256,
            "paused for weights": 0,
        }
        assert [trajectory.outcome for trajectory in world.queue.delivered] == [Outcome.FINISHED]


async def test_one_that_generates_hides_those_that_wait(served: Any) -> None:
    async with served() as world:
        await world.grant(1, 2)
        await world.until(lambda: len(world.engine.asked) == 2)
        await world.say(CALL)
        await world.until(lambda: world.rollouter._leases[1] is Stage.TOOLS)
        await world.spend(1, "generating")
        await world.say(CALL)
        await world.spend(2, "waiting for tools")
        assert world.clock.reading().why == "2 of 2 trajectories wait for tools"
        world.module.tools.set()
        await world.spend(4, "generating")
        parts = world.clock.reading().parts
        assert (parts["generating"], parts["waiting for tools"]) == (1 + 4, 2)


@given(st.lists(st.sampled_from(Stage)), st.booleans(), st.booleans(), st.integers(0, 3))
def test_a_part_is_named_only_where_something_is_in_it(
    stages: list[Stage], started: bool, loading: bool, in_engine: int
) -> None:
    now = part(stages, started=started, loading=loading, in_engine=in_engine, no_lease="depth")
    if not started or loading or in_engine:
        assert now.name == ("starting" if not started else "paused for weights" if loading else "generating")
    elif not stages:
        assert (now.name, now.why) == ("no lease", "depth")
    else:
        stage = next(stage for stage, name in NAMES if name == now.name)
        assert now.why == f"{Counter(stages)[stage]} of {len(stages)} trajectories {stage}"
        assert stage in stages


# -- the log -------------------------------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "slipstream.rollouter.failures"]


async def test_a_reward_that_always_raises_is_read_once_and_then_counted(
    served: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with served() as world:
        world.module.problem = "no answer"
        world.module.rewards.set()
        for number in range(1, 13):
            await world.grant(number)
            await world.say(f"It is {number}.")
        await world.until(lambda: len(world.queue.delivered) == 12)
        assert {trajectory.outcome for trajectory in world.queue.delivered} == {Outcome.REWARD_FAILED}
        first, counted = lines(caplog)
        assert first.startswith("lease 1, task task 1, attempt 0: reward_failed: reward right raised:\nTraceback")
        assert 'environment.py", line' in first
        assert first.rstrip().endswith("ValueError: no answer in It is 1.")
        assert counted == "10 times so far: reward_failed: ValueError: no answer in It is #."
        world.rollouter._leave(0)
        await asyncio.wait([world.exit])
        assert "what went wrong, in all: 12 x reward_failed: ValueError: no answer in It is #." in caplog.text


async def test_errors_that_are_new_each_time_fill_no_log(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with served() as world:
        world.module.problem = "no"
        world.module.rewards.set()
        for number in range(MOST_KINDS + 20):
            await world.grant(number)
            await world.say("x" * number)
        await world.until(lambda: len(world.queue.delivered) == MOST_KINDS + 20)
        assert len(lines(caplog)) == MOST_KINDS + 2  # the first of "other errors", and its tenth
        assert lines(caplog)[-1] == "10 times so far: reward_failed: other errors"


async def test_tool_errors_and_late_deliveries_are_in_the_log(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with served() as world:
        world.module.rewards.set()
        world.queue.late.append(2)
        await world.grant(1, 2)
        await world.say(CALL.replace("look", "lok"))
        await world.say("<tool_call>{</tool_call><tool_call>[</tool_call>")
        await world.say("Done.")
        await world.say("Done.")
        await world.until(lambda: len(world.queue.delivered) == 2)
        await world.until(lambda: len(lines(caplog)) == 3)
        tool, unread, late = sorted(lines(caplog))
        assert tool == "lease 1, task task 1, attempt 0: tool lok: Error: there is no tool 'lok'; there are: look"
        assert unread.startswith("lease 2, task task 2, attempt 0: a call that cannot be read: Error: the call is not ")
        assert re.match(r"lease 2, .*not taken by the queue: its lease had ended .*; \d+ tokens$", late)


# -- the end -------------------------------------------------------------------------------------------------------


async def test_sigterm_gives_the_leases_back(served: Any) -> None:
    async with served() as world:
        await world.grant(1, 2, 3)
        await world.until(lambda: len(world.engine.asked) == 3)
        await world.say("Done.", index=1)
        world.module.rewards.set()
        await world.until(lambda: world.queue.delivered)
        signal.raise_signal(signal.SIGTERM)
        assert await asyncio.wait_for(world.exit, DEADLINE) == 0
        assert sorted([*world.queue.given_back, *(t.lease for t in world.queue.delivered)]) == [1, 2, 3]


@pytest.mark.parametrize("idle", [True, False])
async def test_a_dead_engine_ends_the_process(served: Any, idle: bool) -> None:
    """Also one that dies with nothing to do; what failed in it is delivered as that, and no new leases are taken."""
    async with served() as world:
        if not idle:
            await world.grant(1, 2)
            await world.until(lambda: len(world.engine.asked) == 2)
        world.engine.gone = True
        for _, future in world.engine.asked:
            future.set_exception(EngineFailed("gone"))
        assert await asyncio.wait_for(world.exit, DEADLINE) == 1
        assert [t.outcome for t in world.queue.delivered] == [Outcome.ENGINE_FAILED] * (0 if idle else 2)
        assert world.queue.given_back == []
