"""Tasks solved by one set of weights, several times each, without a queue or a learner: what `slipstream eval` does.

Invariant: every attempt is counted: one without a reward (it failed, or its reward did) is not passed, and its outcome
says why. The same config, weights and seed make the same attempts' seeds.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from math import comb

import msgspec

from slipstream.agent_loop.environment import load_environment
from slipstream.agent_loop.loop import AgentLoop
from slipstream.agent_loop.renderer import create_renderer
from slipstream.config import Config
from slipstream.rollouter.engine import Engine, prepare_environment
from slipstream.staleness.seeds import sample_seed
from slipstream.task import Task
from slipstream.trajectory import Trajectory

PASSED = 1.0  # least reward of an attempt that passed


class Evaluation(msgspec.Struct, kw_only=True):
    """Means are over tasks, of each task's attempts."""

    model: str
    tasks: int
    samples: int  # attempts a task
    mean_reward: float  # of attempts that have a reward
    mean_at_k: float  # share of a task's attempts that passed
    pass_at: dict[int, float]  # by k: chance that one of k attempts passes
    outcomes: dict[str, int]  # attempts by outcome
    turns_mean: float
    tool_calls: int
    tool_errors: int
    tokens: int  # sampled
    seconds: float  # with the engine's start


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Chance that at least one of `k` attempts drawn from `samples`, of which `passed` passed, passed: the unbiased
    estimate of Chen et al. 2021 (arXiv 2107.03374).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... and `most`.

    >>> powers_of_two(6)
    [1, 2, 4, 6]
    """
    return sorted({1 << bit for bit in range(most.bit_length())} | {most})


def attempt_all(
    config: Config, tasks: list[Task], samples: int, on_ended: Callable[[Trajectory], object]
) -> list[Trajectory]:
    """`samples` attempts at every task, those of task n at [n * samples, (n + 1) * samples). Starts an engine with
    `config.model.path` and ends it. Raises EngineFailed, UserError."""
    prepare_environment(config.engine)
    import uvloop

    return uvloop.run(_attempt_all(config, tasks, samples, on_ended))


async def _attempt_all(
    config: Config, tasks: list[Task], samples: int, on_ended: Callable[[Trajectory], object]
) -> list[Trajectory]:
    concurrency = config.rollout.concurrency
    engine = Engine.start(config.model.path, config.model.dtype, config.engine, concurrency)
    try:
        await engine.serve_as(0)
        agents = AgentLoop(
            load_environment(config.environment.path), create_renderer(config.model.path), engine, config.rollout
        )
        room = asyncio.Semaphore(concurrency)

        async def attempt(number: int) -> Trajectory:
            task, member = divmod(number, samples)
            async with room:
                trajectory = await agents.run(
                    lease=number,
                    group=task,
                    task=tasks[task],
                    attempt=member,
                    seed=sample_seed(config.run.seed, task, member, 0),
                    t_leased=time.time(),
                )
            on_ended(trajectory)
            return trajectory

        async with asyncio.TaskGroup() as everything:
            going = [everything.create_task(attempt(number)) for number in range(len(tasks) * samples)]
        await agents.close()
        return [task.result() for task in going]
    finally:
        engine.shutdown()


def evaluation(model: str, trajectories: list[Trajectory], samples: int, seconds: float) -> Evaluation:
    """Of `attempt_all`'s trajectories."""
    passed = [(trajectory.reward or 0.0) >= PASSED for trajectory in trajectories]
    by_task = [sum(passed[start : start + samples]) for start in range(0, len(passed), samples)]
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    return Evaluation(
        model=model,
        tasks=len(by_task),
        samples=samples,
        mean_reward=sum(rewards) / len(rewards) if rewards else 0.0,
        mean_at_k=sum(passed) / len(passed),
        pass_at={
            k: sum(pass_at_k(samples, count, k) for count in by_task) / len(by_task) for k in powers_of_two(samples)
        },
        outcomes=dict(Counter(trajectory.outcome.value for trajectory in trajectories).most_common()),
        turns_mean=sum(trajectory.turns for trajectory in trajectories) / len(trajectories),
        tool_calls=sum(trajectory.tool_calls for trajectory in trajectories),
        tool_errors=sum(trajectory.tool_errors for trajectory in trajectories),
        tokens=sum(sum(trajectory.sampled) for trajectory in trajectories),
        seconds=round(seconds, 1),
    )
