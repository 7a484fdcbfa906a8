"""Queues to test against: in a process of its own, or in the test's own loop."""

import asyncio
import os
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
from queue_made import make_config, make_tasks

from slipstream.config import RunDir
from slipstream.queue.broker import Broker
from slipstream.queue.client import QueueClient
from slipstream.queue.tasks import TaskOrder

HERE = Path(__file__).parent


class Queue:
    """A queue process that can be killed and started again on the same run directory."""

    def __init__(self, root: Path, limit_files: int | None = None, **sections: dict[str, object]) -> None:
        self.run_dir = RunDir(root)
        self._limit_files = limit_files
        self._sections = msgspec.json.encode(sections).decode()
        self.start()

    def start(self) -> None:
        url = self.run_dir.root / "queue.url"
        url.unlink(missing_ok=True)
        paths = os.pathsep.join([str(HERE), *sys.path])
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "broker_process.py"), str(self.run_dir.root), self._sections],
            env={**os.environ, "PYTHONPATH": paths},
            stderr=(self.run_dir.root / "queue.log").open("a"),
            preexec_fn=self._limit,
        )
        while not url.exists():
            assert self.process.poll() is None, (self.run_dir.root / "queue.log").read_text()
            time.sleep(0.02)
        self.url = url.read_text().strip()

    def _limit(self) -> None:
        if self._limit_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self._limit_files, self._limit_files))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(10)


@contextmanager
def queue(root: Path, limit_files: int | None = None, **sections: dict[str, object]) -> Iterator[Queue]:
    it = Queue(root, limit_files, **sections)
    try:
        yield it
    finally:
        it.kill()


@asynccontextmanager
async def in_process(root: Path, **sections: dict[str, object]) -> AsyncIterator[tuple[Broker, QueueClient]]:
    """The broker in this very loop, for tests that look inside."""
    config = make_config(**sections)
    broker = Broker(config, RunDir(root), TaskOrder(make_tasks(), make_tasks(3, "h"), seed=0))
    stop = asyncio.Event()
    serving = asyncio.create_task(broker.serve(stop))
    try:
        async with QueueClient((root / "queue.url").read_text().strip(), role="rollouter", name="a") as one:
            yield broker, one
    finally:
        stop.set()
        await serving
        broker.close()
