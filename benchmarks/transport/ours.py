"""Trajectories through the queue as a run sends them: rollouter -> broker with journal -> learner's tensors.

    python benchmarks/transport/ours.py cost|latency|held COUNT

Prints one JSON object. Three processes; the broker's journal is on disk, with the default fsync.
"""

import asyncio
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import psutil
from corpus import GROUP, Cost, Meter, lengths, trajectories

from slipstream.config import Config, RunDir
from slipstream.queue import broker, packed
from slipstream.queue.client import LearnerClient, QueueClient
from slipstream.queue.messages import Fate, Lease, TensorInfo, Weights
from slipstream.task import Task
from slipstream.trajectory import Trajectory

AT_ONCE = 16  # deliveries without an answer
BATCH = 4  # groups a step
LARGE, AT_A_TIME = 800, 100  # trajectories


class Latency(msgspec.Struct):
    p50_ms: float
    p99_ms: float


class Held(msgspec.Struct):
    memory_ratio: float  # growth of the broker's resident memory / bytes that it holds
    flatness: float  # CPU seconds of the broker for the last tenth of all / for the first
    bytes_held: int


def make_config() -> Config:
    return msgspec.convert(
        {
            "model": {"path": "m"},
            "environment": {"path": "e.py:e"},
            "tasks": {"train": "t.jsonl"},
            "run": {"steps": 10**6},
            "rollout": {"group": GROUP},
            "learner": {"batch": BATCH},
            "staleness": {"depth": 10**6, "cutoff": 10**6},
            "queue": {"memory_mb": 10**6, "lease_seconds": 3600.0},
        },
        Config,
    )


def serve(root: str) -> None:
    import uvloop

    uvloop.run(broker.serve(make_config(), RunDir(Path(root)), [Task(id="task", prompt="?")], []))


@contextmanager
def queue() -> Iterator[tuple[str, psutil.Process]]:
    """The address of a broker in a process of its own, and that process."""
    with tempfile.TemporaryDirectory() as root:
        process = multiprocessing.get_context("spawn").Process(target=serve, args=[root])
        process.start()
        url = Path(root) / "queue.url"
        while not url.exists():
            assert process.is_alive(), "the queue ended"
            time.sleep(0.02)
        try:
            yield url.read_text().strip(), psutil.Process(process.pid)
        finally:
            process.terminate()
            process.join()


# -- the rollouter ---------------------------------------------------------------------------------------------------


def leased(trajectory: Trajectory, lease: Lease) -> Trajectory:
    return msgspec.structs.replace(trajectory, lease=lease.lease, group=lease.group, t_done=time.time())


def produce(url: str, of_lengths: Sequence[int], per_second: float = 0.0) -> Cost:
    import uvloop

    return uvloop.run(_produce(url, trajectories(of_lengths), per_second))


async def _produce(url: str, made: list[Trajectory], per_second: float) -> Cost:
    """As fast as the answers come, or at a steady pace."""
    async with QueueClient(url, role="rollouter", name="a") as client:
        meter, began = Meter(), time.perf_counter()
        room = asyncio.Semaphore(AT_ONCE)

        async def deliver(trajectory: Trajectory) -> None:
            async with room:
                assert (await client.deliver(trajectory)).leases == [trajectory.lease]

        async with asyncio.TaskGroup() as tasks:
            sent = 0
            while sent < len(made):
                granted = await client.ask(min(AT_ONCE, len(made) - sent), wait_s=5.0)
                for lease in granted.leases:
                    if per_second:
                        await asyncio.sleep(began + sent / per_second - time.perf_counter())
                    async with room:
                        pass
                    tasks.create_task(deliver(leased(made[sent], lease)))
                    sent += 1
        return meter.cost(sum(len(trajectory.token_ids) for trajectory in made))


# -- the learner -----------------------------------------------------------------------------------------------------


def consume(url: str, groups: int) -> tuple[Cost, list[float]]:
    """Take, make tensors of, and settle so many groups. Also how long each took since its last member was done."""
    weights = Weights(version=0, location="", checksum="", tensors=[TensorInfo("w", "float32", [1])])
    with closing(LearnerClient(url, version=0)) as learner:
        learner.publish(weights)
        meter = Meter()
        tokens, delays, batch = 0, list[float](), list[tuple[int, list[Fate]]]()
        while groups:
            taken, _ = learner.take(BATCH, 30.0)
            for number, batches in taken:
                tensors = packed(batches)
                done = max(one.column("t_done")[0].as_py() for one in batches)
                delays.append(time.time() - done)
                tokens += len(tensors.token_ids)
                bounds = tensors.cu_seqlens.tolist()
                of_each = zip(tensors.leases.tolist(), bounds[:-1], bounds[1:], strict=True)
                fates = [Fate(lease=n, outcome="", trained=int(tensors.sampled[a:b].sum())) for n, a, b in of_each]
                batch.append((number, fates))
            groups -= len(taken)
            if len(batch) >= BATCH or not groups:
                weights = msgspec.structs.replace(weights, version=weights.version + 1)
                learner.publish(weights)
                learner.settle([number for number, _ in batch], [f for _, fs in batch for f in fs], weights.version)
                learner.checkpointed(weights.version)
                batch = []
        return meter.cost(tokens), delays


# -- what is measured ------------------------------------------------------------------------------------------------


def run(count: int, per_second: float = 0.0) -> tuple[Cost, list[float]]:
    """CPU seconds of all three processes."""
    of_lengths = lengths(count)
    with queue() as (url, process), ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as workers:
        before = process.cpu_times()
        consuming = workers.submit(consume, url, count // GROUP)
        producing = workers.submit(produce, url, of_lengths, per_second)
        (learner, delays), rollouter = consuming.result(), producing.result()
        after = process.cpu_times()
        own = after.user + after.system - before.user - before.system
    assert learner.tokens == rollouter.tokens == sum(of_lengths)
    print(f"CPU: rollouter {rollouter.cpu_s:.2f} s, queue {own:.2f} s, learner {learner.cpu_s:.2f} s", file=sys.stderr)
    return Cost(rollouter.tokens, rollouter.cpu_s + own + learner.cpu_s, rollouter.wall_s), delays


def latency(count: int) -> Latency:
    """From `deliver` of a group's last member until its tensors are there, at half the pace that goes through."""
    fastest, _ = run(count)
    pace = 0.5 * count / fastest.wall_s
    delays = sorted(run(count, pace)[1])
    return Latency(p50_ms=1000 * delays[len(delays) // 2], p99_ms=1000 * delays[int(len(delays) * 0.99)])


def held(count: int) -> Held:
    """Nobody takes anything: memory against bytes with some 100 MB of ordinary trajectories, then many short ones and
    what one more costs the broker."""
    ordinary, short = trajectories(lengths(LARGE)), trajectories([64] * AT_A_TIME)
    with queue() as (url, process):
        costs: list[float] = []

        async def fill() -> tuple[float, int]:
            async with QueueClient(url, role="rollouter", name="a") as client:
                await deliver_all(client, short)  # what is made once is made now
                empty, before = process.memory_info().rss, (await client.status()).bytes_held
                for at in range(0, LARGE, AT_A_TIME):
                    await deliver_all(client, ordinary[at : at + AT_A_TIME])
                bytes_held = (await client.status()).bytes_held - before
                ratio = (process.memory_info().rss - empty) / bytes_held
                for _ in range(count // AT_A_TIME):
                    began = process.cpu_times()
                    await deliver_all(client, short)
                    ended = process.cpu_times()
                    costs.append(ended.user + ended.system - began.user - began.system)
                return ratio, bytes_held

        ratio, bytes_held = asyncio.run(fill())
    tenth = max(1, len(costs) // 10)
    return Held(ratio, sum(costs[-tenth:]) / sum(costs[:tenth]), bytes_held)


async def deliver_all(client: QueueClient, made: list[Trajectory]) -> None:
    leases: list[Lease] = []
    while len(leases) < len(made):
        leases += (await client.ask(len(made) - len(leases), wait_s=5.0)).leases
    await asyncio.gather(*(client.deliver(leased(one, lease)) for one, lease in zip(made, leases, strict=True)))


if __name__ == "__main__":
    what, count = sys.argv[1], int(sys.argv[2])
    result = run(count)[0] if what == "cost" else latency(count) if what == "latency" else held(count)
    print(msgspec.json.encode(result).decode())
