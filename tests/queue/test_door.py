"""Who gets in, and what a peer that means ill or is broken costs the others."""

import asyncio
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from queue_made import make_trajectory
from queue_runs import in_process, queue

from slipstream.errors import UserError
from slipstream.queue import address
from slipstream.queue import messages as ms
from slipstream.queue.client import LearnerClient, QueueClient
from slipstream.queue.keys import ClientKeys, read_client_keys

LOOPBACK = {"listen": "tcp://127.0.0.1:*"}


@contextmanager
def stranger(url: str, keys: ClientKeys | None = None) -> Iterator[Any]:
    """A socket that connects with these keys, or with none."""
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    if keys is not None:
        keys.use(dealer)
    dealer.connect(address.split(url)[0])
    try:
        yield dealer
    finally:
        context.destroy(linger=0)


def request(message: ms.Message, number: int = 1) -> list[bytes]:
    return [number.to_bytes(8), msgspec.msgpack.encode(message)]


@asynccontextmanager
async def served(root: Path, **sections: dict[str, object]) -> AsyncIterator[tuple[Any, QueueClient, str]]:
    async with in_process(root, **sections) as (broker, one):
        yield broker, one, (root / "queue.url").read_text().strip()


async def test_on_tcp_only_the_key_lets_in(tmp_path: Path) -> None:
    """Neither no keys, nor the queue's public key alone, nor a key of another run gets an answer."""
    async with served(tmp_path, queue=LOOPBACK) as (broker, one, url):
        key = read_client_keys(tmp_path / "queue.key")
        other = ClientKeys(key.queue, *(part.decode() for part in zmq.curve_keypair()))
        for keys in (None, other):
            with stranger(url, keys) as dealer:
                await dealer.send_multipart(request(ms.AskStatus()))
                assert not await dealer.poll(700)
        assert broker.refusals.count >= 1
        with stranger(url, key) as dealer:
            await dealer.send_multipart(request(ms.AskStatus()))
            assert await dealer.poll(10_000)
        assert (await one.ask(1, wait_s=5)).leases


async def test_a_wrong_key_is_said_and_not_waited_for(tmp_path: Path) -> None:
    async with served(tmp_path, queue=LOOPBACK) as (_, _one, url):
        key = read_client_keys(tmp_path / "queue.key")
        wrong = tmp_path / "wrong.key"
        wrong.write_bytes(msgspec.json.encode(ClientKeys(key.queue, *(k.decode() for k in zmq.curve_keypair()))))
        wrong.chmod(0o600)
        address_with_it = f"{address.split(url)[0]}#{wrong}"
        with pytest.raises(UserError, match="does not know this key"):
            async with asyncio.timeout(20):
                await QueueClient(address_with_it, role="rollouter", name="b").__aenter__()
        with pytest.raises(UserError, match="does not know this key"):
            await asyncio.to_thread(LearnerClient, address_with_it, version=0)
        for bad in (address.split(url)[0], f"{address.split(url)[0]}#{tmp_path / 'none'}", "tcp://nonsense#x"):
            with pytest.raises(UserError):
                await QueueClient(bad, role="rollouter", name="b").__aenter__()


def test_keys_are_the_owners_alone_and_stay_for_the_run(tmp_path: Path) -> None:
    with queue(tmp_path, queue=LOOPBACK) as it:
        files = [tmp_path / "queue.key", tmp_path / "queue.secret"]
        assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]
        first = [file.read_bytes() for file in files]
        assert first[1] not in first[0]
        it.kill()
        it.start()
        assert [file.read_bytes() for file in files] == first
    files[0].chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        read_client_keys(files[0])


async def test_the_socket_file_is_the_owners_alone(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _one, url):
        assert stat.S_IMODE(Path(url.removeprefix("ipc://")).stat().st_mode) == 0o600


async def test_what_no_message_may_say_is_refused(tmp_path: Path) -> None:
    """Numbers that would overflow the journal or an answer, waits that never end: the queue goes on."""
    async with served(tmp_path) as (broker, one, url):
        (lease,) = (await one.ask(1, wait_s=5)).leases
        bad = [
            {"type": "Evaluate", "version": 1 << 60},
            {"type": "Evaluate", "version": -1},
            {"type": "Hello", "role": "rollouter", "name": "x" * 201, "pid": 1},
            {"type": "Settle", "groups": [0], "fates": [{"lease": 1, "outcome": "finished", "trained": -1}]},
            {"type": "Settle", "groups": [0], "fates": [{"lease": 1, "outcome": "finished", "trained": 1 << 63}]},
            {"type": "Checkpointed", "version": 1 << 63},
            {"type": "Ask", "name": "a", "room": 1 << 63, "wait_s": 0.0},
            {"type": "Take", "room": -(1 << 63), "held": [], "wait_s": 0.0},
        ]
        with stranger(url) as dealer:
            for n, message in enumerate(bad):
                await dealer.send_multipart([n.to_bytes(8), msgspec.msgpack.encode(message)])
                assert b"Refused" in (await asyncio.wait_for(dealer.recv_multipart(), 10))[1]
            await dealer.send_multipart(request(ms.Take(room=1 << 30, held=[1 << 62], wait_s=float("nan")), 99))
            await dealer.send_multipart(request(ms.Ask(name="b", room=-(1 << 30), wait_s=0.0), 98))
            assert b"Granted" in (await asyncio.wait_for(dealer.recv_multipart(), 10))[1]
        assert broker.refusals.count == len(bad)
        assert (await one.deliver(make_trajectory(lease))).leases == [lease.lease]


async def test_frames_over_the_limit_are_refused_or_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.queue.broker.MOST_FRAME_BYTES", 10_000)
    async with served(tmp_path) as (broker, one, url):
        with stranger(url) as dealer:
            await dealer.send_multipart([*request(ms.Deliver(name="b")), b"x" * 10_001])
            assert b"at most 10000" in (await asyncio.wait_for(dealer.recv_multipart(), 10))[1]
            await dealer.send_multipart([*request(ms.Deliver(name="b")), b"x" * 20_001])
            assert not await dealer.poll(500)
        assert broker.refusals.count == 1
        assert (await one.ask(1, wait_s=5)).leases


async def test_too_many_requests_of_one_client_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.queue.broker.MOST_REQUESTS", 20)
    async with served(tmp_path) as (broker, one, url):
        with stranger(url) as dealer:
            for n in range(50):
                await dealer.send_multipart(request(ms.AskWeights(newer_than=0, wait_s=60), n))
            answers = [await asyncio.wait_for(dealer.recv_multipart(), 10) for _ in range(30)]
            assert all(b"more than 20 requests" in answer[1] for answer in answers)
        assert broker.refusals.count == 30
        assert (await one.ask(1, wait_s=5)).leases


async def test_a_client_that_reads_nothing_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers to it are held up to a limit and then left out, and said; the others are served meanwhile."""
    monkeypatch.setattr("slipstream.queue.broker.MOST_ANSWERS", 10)
    async with served(tmp_path) as (broker, one, url):
        name = "x" * 200
        context = zmq.asyncio.Context()
        slow = context.socket(zmq.DEALER)
        slow.setsockopt(zmq.RCVHWM, 1)
        slow.setsockopt(zmq.RCVBUF, 4096)
        slow.connect(url)
        for n in range(20_000):
            await slow.send_multipart(request(ms.GiveBack(name=name, leases=[], reason=name), n))
            if broker.refusals.count:
                break
            if n % 50 == 0:
                (lease,) = (await asyncio.wait_for(one.ask(1, wait_s=0), 10)).leases or [None]
                if lease is not None:
                    await asyncio.wait_for(one.deliver(make_trajectory(lease)), 10)
        assert broker.refusals.count
        assert (await asyncio.wait_for(one.status(), 10)).refused
        context.destroy(linger=0)


FLOOD = """
import socket, sys, time
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
held = []
for n in range(count):
    one = socket.socket()
    one.settimeout(1)
    try:
        one.connect((host, port))
        one.sendall(b"\\xff" * (n % 64))
    except OSError:
        pass
    held.append(one)
print("held", flush=True)
sys.stdin.read()
"""


async def test_a_flood_of_connections_leaves_those_that_are_in_alone(tmp_path: Path) -> None:
    """More connections than the queue's process may have; who has the key is served, and gets in again afterwards."""
    with queue(tmp_path, limit_files=128, queue={**LOOPBACK, "fsync": "never"}) as it:
        host, port = address.split(it.url)[0].removeprefix("tcp://").split(":")
        async with QueueClient(it.url, role="rollouter", name="a") as one:
            leases = (await one.ask(4, wait_s=5)).leases
            flood = subprocess.Popen(
                [sys.executable, "-c", FLOOD, host, port, "400"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert flood.stdout
            for lease in leases:
                accepted = await asyncio.wait_for(one.deliver(make_trajectory(lease)), 20)
                assert accepted.leases == [lease.lease]
            assert await asyncio.to_thread(flood.stdout.readline) == b"held\n"
            assert (await asyncio.wait_for(one.status(), 20)).trajectories.generated == 4
            flood.kill()
            flood.wait()
            async with asyncio.timeout(30), QueueClient(it.url, role="rollouter", name="b") as late:
                assert (await late.status()).trajectories.generated == 4
        assert it.process.poll() is None
