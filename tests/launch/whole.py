"""The processes of a whole run in small: the real queue, and a rollouter and a learner without a model.

Files in RUN steer them: while `hold` is there the rollouter begins nothing; the queue dies (or hangs) at the next
request of the kind that `dies` (or `hangs`) names next.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from queue_made import make_beat, make_tasks, make_trajectory, make_weights

from slipstream.config import Config, RunDir
from slipstream.configfile import read_config
from slipstream.observe.clock import Clock
from slipstream.observe.metrics import MetricsWriter
from slipstream.parent import die_with_supervisor
from slipstream.queue import broker
from slipstream.queue.client import LearnerBeats, LearnerClient, QueueClient
from slipstream.queue.messages import Fate


def _begin(name: str) -> tuple[Config, RunDir]:
    die_with_supervisor()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    run_dir = RunDir(Path(sys.argv[1]))
    (run_dir.root / f"{name}.pid").write_text(str(os.getpid()))
    return read_config(run_dir.config, files=False), run_dir


def _url(run_dir: RunDir) -> str:
    while not (path := run_dir.root / "queue.url").is_file():
        time.sleep(0.01)
    return path.read_text().strip()


# -- queue ---------------------------------------------------------------------------------------------------------


class Broker(broker.Broker):
    root: Path

    async def _handle(self, request: Any, number: int, payload: list[Any]) -> Any:
        for name, number_of_signal in (("dies", signal.SIGKILL), ("hangs", signal.SIGSTOP)):
            told = self.root / name
            left = told.read_text().split() if told.exists() else []
            if left and left[0] == type(request).__name__:
                told.write_text(" ".join(left[1:]))
                os.kill(os.getpid(), number_of_signal)
        return await super()._handle(request, number, payload)


def queue() -> None:
    config, run_dir = _begin("queue")
    Broker.root = run_dir.root
    broker.Broker = Broker
    asyncio.run(broker.serve(config, run_dir, make_tasks(), make_tasks(3, "h")))


# -- learner -------------------------------------------------------------------------------------------------------


def learner() -> None:
    """Trains on whatever comes; a version is final as soon as it is made."""
    config, run_dir = _begin("learner")
    saved = run_dir.root / "saved"
    version = int(saved.read_text()) if saved.exists() else 0
    client = LearnerClient(_url(run_dir), version=version)
    metrics = MetricsWriter(run_dir, config)
    clock = Clock("learner", "other")
    LearnerBeats(_url(run_dir), clock)
    client.publish(make_weights(version))
    why = ""
    while version < config.run.steps:
        groups: list[int] = []
        fates: list[Fate] = []
        while len(groups) < config.learner.batch:
            clock.enter("waiting for data", why)
            taken, why = client.take(config.learner.batch - len(groups), wait_s=0.2)
            for group, batches in taken:
                groups.append(group)
                fates += [Fate(lease=batch["lease"][0].as_py(), outcome="finished", trained=3) for batch in batches]
        clock.enter("forward/backward")
        version += 1
        client.publish(make_weights(version))
        client.settle(groups, fates, version)
        parts = clock.reading().parts
        metrics.log(
            version,
            {
                "reward/mean": 0.5,
                "tokens/step_trained": 3.0 * len(fates),
                "staleness/mean": 0.5,
                "staleness/max": 1.0,
                "time/learner/forward_backward": parts["forward/backward"],
            },
        )
        saved.with_suffix(".new").write_text(str(version))
        saved.with_suffix(".new").rename(saved)
        client.checkpointed(version)
    (run_dir.checkpoints / "draft").mkdir(parents=True)
    (run_dir.checkpoints / "draft").rename(run_dir.checkpoints / "final")


# -- rollouter -----------------------------------------------------------------------------------------------------


def rollouter() -> None:
    _, run_dir = _begin("rollouter")
    asyncio.run(_roll(run_dir, "rollouter-0"))


async def _roll(run_dir: RunDir, name: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    clock = Clock(name, "no lease")
    async with QueueClient(_url(run_dir), role="rollouter", name=name) as client:
        working = asyncio.create_task(_work(client, clock, name, lambda: (run_dir.root / "hold").exists()))
        await asyncio.wait([working, asyncio.create_task(stop.wait())], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        working.cancel()


async def _work(client: QueueClient, clock: Clock, name: str, held: Callable[[], bool]) -> None:
    version = -1
    while True:
        beat = make_beat(name)
        beat.clock, beat.version, beat.pause_ms = clock.reading(), version, [2.0]
        await client.beat(beat)
        if held():
            await asyncio.sleep(0.02)
            continue
        newest = (await client.weights(newer_than=-1, wait_s=5.0)).weights
        if newest is None:
            continue
        version = newest.version
        clock.enter("no lease")
        granted = await client.ask(room=2, wait_s=0.2)
        clock.enter("generating")
        for lease in granted.leases:
            await client.deliver(make_trajectory(lease, versions=(max(version, lease.min_version),) * 3))
        if granted.done:
            return
