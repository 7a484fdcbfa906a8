"""A run of the learner in small: the real queue, a learner that comes and goes, and a rollouter that is the test."""

import asyncio
import contextlib
import json
import multiprocessing
import shutil
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path

import msgspec
from learner_world import config, run, trajectory

from slipstream.config import Config, LearnerSection, RolloutSection, RunDir, RunSection, StalenessSection
from slipstream.configfile import write_config
from slipstream.learner import checkpoint, publisher
from slipstream.observe.clock import ClockReading
from slipstream.queue import messages
from slipstream.queue.client import QueueClient
from slipstream.tooluse import ToolUse
from slipstream.trajectory import Outcome
from slipstream.weights_file import checksum, read_tensors

PATIENCE = 60.0


class World:
    """A run directory with a queue, a learner that comes and goes, and a rollouter that is this test."""

    def __init__(self, settings: Config, root: Path, processes: ForkServerContext) -> None:
        self.run_dir, self._processes = RunDir(root), processes
        self.configure(settings)
        self.shared = publisher.weights_directory(settings, self.run_dir, 1)
        self.checksums: dict[int, list[str]] = {}  # of versions, as often as they were published
        self.children: list[multiprocessing.process.BaseProcess] = []
        self._rolling: asyncio.Task[None] | None = None
        self._roll_on = False

    def configure(self, settings: Config) -> None:
        """What starts from now on has these."""
        write_config(settings, self.run_dir.config)
        self._raw = msgspec.to_builtins(settings)

    def start(self, what: str) -> multiprocessing.process.BaseProcess:
        child = self._processes.Process(target=run, args=(what, self._raw, str(self.run_dir.root)))
        child.start()
        self.children.append(child)
        return child

    async def connected(self) -> QueueClient:
        url = self.run_dir.root / "queue.url"
        await until(url.is_file)
        return QueueClient(url.read_text().strip(), role="rollouter", name="fake")

    def resume_rolling_out(self, client: QueueClient) -> None:
        self._roll_on = True
        self._rolling = asyncio.create_task(self._roll_out(client))

    async def stop_rolling_out(self) -> None:
        """Once all it has a lease for is delivered. What it asserts is asserted here."""
        assert self._rolling is not None
        self._roll_on = False
        await self._rolling

    async def _roll_out(self, client: QueueClient) -> None:
        """One trajectory a lease, of the newest weights; every fifth group has no signal, every ninth lease fails."""
        await self._see(await client.weights(newer_than=-1, wait_s=PATIENCE))
        while self._roll_on:
            granted = await client.ask(room=4, wait_s=0.2)
            # There are none for a moment when a learner is back to make versions again.
            newest = await client.weights(newer_than=-1, wait_s=PATIENCE)
            await self._see(newest)
            assert newest.weights is not None
            for lease in granted.leases:
                reward = 1.0 if lease.group % 5 == 4 else float(lease.member % 2)
                outcome = Outcome.TIMEOUT if lease.lease % 9 == 8 else Outcome.FINISHED
                made = trajectory(
                    lease.lease, lease.group, length=16, reward=reward, outcome=outcome, versions=newest.weights.version
                )
                made.task, made.attempt = lease.task.id, lease.attempt
                await client.deliver(made)
            await self._beat(client, newest.weights.version)

    async def _see(self, newest: messages.Newest) -> None:
        weights = newest.weights
        if weights is None or self.checksums.get(weights.version, [""])[-1] == weights.checksum:
            return
        with contextlib.suppress(FileNotFoundError):  # by now there is a newer one
            assert checksum(read_tensors(weights)) == weights.checksum
        self.checksums.setdefault(weights.version, []).append(weights.checksum)

    async def _beat(self, client: QueueClient, version: int) -> None:
        await client.beat(
            messages.RollouterBeat(
                name="fake",
                version=version,
                running=0,
                leases=[],
                tokens_in_flight=[],
                tokens_generated=0,
                pause_ms=[2.0],
                clock=ClockReading(process="fake", parts={"generating": 1.0}, now="generating"),
                tools=[ToolUse(name="search", calls=3, errors=1, seconds={50: 2})],
            )
        )

    def metrics(self) -> list[dict[str, float]]:
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in self.run_dir.metrics.read_text().splitlines()]
        return []

    def saved(self) -> list[str]:
        return [path.name for path in checkpoint.whole(self.run_dir.checkpoints)]

    def end(self) -> None:
        for child in self.children:
            child.kill()
            child.join()
        shutil.rmtree(self.shared, ignore_errors=True)  # it is gone already, unless the test failed


async def until(holds: Callable[[], object], seconds: float = PATIENCE) -> None:
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends, f"waited {seconds:.0f} s"
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def world(settings: Config, root: Path, processes: ForkServerContext) -> AsyncIterator[tuple[World, QueueClient]]:
    """With a queue that serves and a rollouter that rolls out."""
    made = World(settings, root, processes)
    try:
        made.start("queue")
        async with await made.connected() as client:
            made.resume_rolling_out(client)
            yield made, client
            await made.stop_rolling_out()
    finally:
        made.end()


def settings(model: Path, *, steps: int, every: int = 2) -> Config:
    return config(
        model,
        run=RunSection(steps=steps),
        rollout=RolloutSection(group=2, max_tokens=12),
        staleness=StalenessSection(depth=1.0, cutoff=2),
        learner=LearnerSection(batch=2, lr=1e-3, warmup=2, checkpoint_every=every, micro_tokens=40, threads=1),
    )


async def ended(child: multiprocessing.process.BaseProcess) -> int | None:
    await until(lambda: child.exitcode is not None)
    return child.exitcode
