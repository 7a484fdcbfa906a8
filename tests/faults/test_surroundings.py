"""What the machine does to a run: its disk is full, the queue's port is cut off, the clock jumps."""

import ast
import asyncio
import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "queue"))

from queue_made import make_beat, make_trajectory  # noqa: E402
from queue_runs import in_process, queue  # noqa: E402

import slipstream  # noqa: E402
from slipstream.config import RunDir  # noqa: E402
from slipstream.queue import accounts, address, broker  # noqa: E402
from slipstream.queue.client import QueueClient  # noqa: E402

SMALL = 40_000  # bytes

# -- the disk --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """A file system of its own for the run: what fills it, and what makes room."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "slipstream-test", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs wants rights that are not here; the file size's limit is tested instead")
    filler = folder / "filler"

    def fill(pid: int) -> None:
        left = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        filler.write_bytes(bytes(left - SMALL))

    try:
        yield fill, lambda pid: filler.unlink()
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def small_files(folder: Path) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """No file of the process grows over so much."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(most: int) -> Callable[[int], None]:
        def change(pid: int) -> None:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, hard))

        return change

    yield limit(SMALL), limit(hard)


@pytest.mark.parametrize("disk", [small_disk, small_files])
async def test_a_disk_that_fills_up_stops_the_grants_until_there_is_room(
    disk: Callable[[Path], contextlib.AbstractContextManager[tuple[Callable[[int], None], Callable[[int], None]]]],
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with disk(run) as (fill, make_room), queue(run, staleness={"depth": 200}) as it:
        fill(it.process.pid)
        async with asyncio.timeout(60), QueueClient(it.url, role="rollouter", name="a") as one:
            granted, fault = 0, ""
            deliveries: list[asyncio.Task[object]] = []
            while "make room on its disk" not in fault:
                answer = await one.ask(4, wait_s=0.1)
                granted += len(answer.leases)
                deliveries += [asyncio.create_task(one.deliver(make_trajectory(lease))) for lease in answer.leases]
                await asyncio.wait(deliveries, timeout=0.1)
                fault = (await one.status()).why
            assert (await one.ask(4, wait_s=0.1)).why == fault
            assert not all(delivery.done() for delivery in deliveries)  # none is acknowledged that is not written
            make_room(it.process.pid)
            await asyncio.gather(*deliveries)
            while not (more := (await one.ask(2, wait_s=1.0)).leases):
                pass
            status = await one.status()
            assert (status.trajectories.generated, status.leases.running) == (granted, len(more))
        it.kill()
        it.start()
        found = accounts(RunDir(run))
    assert found.holds()
    assert found.trajectories.generated == granted > 0
    assert found.leases.duplicates == 0


# -- the port --------------------------------------------------------------------------------------------------------


class Wire:
    """Stands between clients and a port of this machine, until it is cut."""

    def __init__(self, port: int) -> None:
        self._to, self.port = port, 0
        self._pipes: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.StreamWriter] = set()

    async def join(self) -> None:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> int:
        """How many connections there were."""
        self._server.close()
        count = len(self._pipes) // 2
        for end in self._ends:
            end.transport.abort()
        for pipe in self._pipes:
            pipe.cancel()
        if self._pipes:
            await asyncio.wait(self._pipes)
        self._ends.clear()
        self._pipes.clear()
        await self._server.wait_closed()
        return count

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection("127.0.0.1", self._to)
        self._ends |= {writer, outer}
        self._pipes |= {asyncio.create_task(self._pipe(*ends)) for ends in ((reader, outer), (inner, writer))}

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()


@contextlib.asynccontextmanager
async def wired(url: str) -> AsyncIterator[tuple[Wire, str]]:
    """The wire, and the address behind it."""
    wire = Wire(int(address.split(url)[0].rpartition(":")[2]))
    await wire.join()
    try:
        yield wire, f"tcp://127.0.0.1:{wire.port}#{address.split(url)[1]}"
    finally:
        await wire.cut()


async def test_a_port_that_is_cut_off_again_and_again_costs_time_alone(tmp_path: Path) -> None:
    with queue(tmp_path, queue={"listen": "tcp://127.0.0.1:*"}, staleness={"depth": 20}) as it:
        async with (
            asyncio.timeout(60),
            wired(it.url) as (wire, url),
            QueueClient(url, role="rollouter", name="a") as one,
        ):
            made = 0
            for _ in range(3):
                leases = (await one.ask(6, wait_s=20.0)).leases
                made += len(leases)
                deliveries = [asyncio.create_task(one.deliver(make_trajectory(lease))) for lease in leases]
                asked = asyncio.create_task(one.ask(1, wait_s=5.0))
                await asyncio.sleep(0)
                assert await wire.cut() > 0
                await asyncio.wait(deliveries, timeout=0.3)
                await wire.join()
                await asyncio.gather(*deliveries)
                for lease in (await asked).leases:
                    made += 1
                    await one.deliver(make_trajectory(lease))
            status = await one.status()
        assert it.process.poll() is None
        assert (status.trajectories.generated, status.leases.running) == (made, 0)
        assert accounts(RunDir(tmp_path)).holds()
        assert made >= 18


# -- the clock -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [-1e8, 1e8])
async def test_a_clock_that_jumps_ends_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    monkeypatch.setattr(broker, "WATCH_SECONDS", 0.01)
    looks: asyncio.Queue[float] = asyncio.Queue()
    async with in_process(tmp_path) as (served, one):
        expire = served.ledger.expire
        monkeypatch.setattr(served.ledger, "expire", lambda now: (looks.put_nowait(now), expire(now)))
        leases = (await one.ask(4, wait_s=5)).leases
        await one.beat(make_beat("a", [lease.lease for lease in leases]))
        before = time.time
        monkeypatch.setattr(time, "time", lambda: before() + jump)
        for _ in range(looks.qsize() + 3):
            await looks.get()
        assert (await one.status()).leases.running == 4
        for lease in leases:
            assert (await one.deliver(make_trajectory(lease))).leases == [lease.lease]
        assert (await one.status()).leases.returned == {}


def test_no_duration_is_measured_with_a_clock_that_jumps() -> None:
    """`time.time` is for what people read, and for files' times."""
    allowed = {"launch/status.py", "learner/publisher.py"}  # since when; how old files are
    package = Path(slipstream.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and "time.time()" in ast.unparse(node)
    }
    assert found <= allowed
