"""The queue as its users meet it: real sockets, a process of its own, and kills."""

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq
from queue_made import make_beat, make_config, make_tasks, make_trajectory, make_weights
from queue_runs import Queue, in_process, queue

from slipstream.config import RunDir
from slipstream.errors import UserError
from slipstream.queue import accounts, encode, is_heldout, packed, read_trajectories
from slipstream.queue.broker import Broker
from slipstream.queue.client import LearnerClient, QueueAway, QueueClient, QueueRefused
from slipstream.queue.messages import Ask, AskStatus, Deliver, Fate, Granted, Take
from slipstream.queue.tasks import TaskOrder
from slipstream.trajectory import Outcome


def client(it: Queue, name: str = "a", role: str = "rollouter") -> QueueClient:
    return QueueClient(it.url, role=role, name=name)


def train(learner: LearnerClient, version: int, groups: int) -> list[int]:
    """One step: take, publish, settle. The leases that were consumed."""
    taken: list[tuple[int, list[object]]] = []
    until = time.monotonic() + 30
    while len(taken) < groups:
        found, why = learner.take(groups - len(taken), 1.0)
        taken += found
        assert time.monotonic() < until, why
    fates = [
        Fate(lease=int(tensors.leases[n]), outcome=tensors.outcomes[n], trained=int(tensors.sampled[a:b].sum()))
        for tensors in (packed(batches) for _, batches in taken)
        for n, (a, b) in enumerate(zip(tensors.cu_seqlens[:-1], tensors.cu_seqlens[1:], strict=True))
    ]
    learner.publish(make_weights(version))
    learner.settle([number for number, _ in taken], fates, version)
    return [fate.lease for fate in fates]


async def work(it: Queue, name: str, made: list[int]) -> None:
    """A rollouter: asks, makes, delivers (some twice), until the run is over."""
    async with client(it, name) as rollouter:
        version = -1
        while True:
            granted = await rollouter.ask(3, wait_s=0.5)
            if granted.done:
                return
            newest = (await rollouter.weights(version, wait_s=0)).weights
            version = newest.version if newest else version
            for lease in granted.leases:
                trajectory = make_trajectory(lease, versions=[max(0, version)] * 3, reward=float(lease.member % 2))
                accepted = await rollouter.deliver(trajectory)
                assert accepted.leases + accepted.duplicates == [lease.lease]
                if lease.lease % 3 == 0:
                    assert (await rollouter.deliver(trajectory)).duplicates == [lease.lease]
                made.append(lease.lease)
            await rollouter.beat(make_beat(name))


@pytest.mark.parametrize("fsync", ["delivery", "interval", "never"])
async def test_kill_nine_at_any_moment_loses_nothing_and_trains_nothing_twice(tmp_path: Path, fsync: str) -> None:
    """Two rollouters, a learner, and a queue that is killed again and again in the middle of it."""
    steps, killed = 12, 0
    with queue(tmp_path, run={"steps": steps}, queue={"fsync": fsync}, staleness={"cutoff": 99}) as it:
        made: list[int] = []
        trained: list[int] = []
        stepped = threading.Event()

        def learn() -> None:
            learner = LearnerClient(it.url, version=0)
            try:
                learner.publish(make_weights(0))
                for version in range(1, steps + 1):
                    trained.extend(train(learner, version, 2))
                    stepped.set()
                learner.checkpointed(steps)
            finally:
                stepped.set()
                learner.close()

        async with asyncio.TaskGroup() as group:
            learning = group.create_task(asyncio.to_thread(learn))
            group.create_task(work(it, "a", made))
            group.create_task(work(it, "b", made))
            while killed < 4:
                await asyncio.to_thread(stepped.wait)
                stepped.clear()
                await asyncio.to_thread(it.kill)
                await asyncio.to_thread(it.start)
                killed += 1
            await learning
            async with client(it, "supervisor", "observer") as supervisor:
                await supervisor.drain(done=True)
        assert killed == 4
        assert len(trained) == len(set(trained)) == steps * 2 * 2
        assert it.stop() == 0
    found = accounts(RunDir(tmp_path))
    assert found.holds()
    assert found.trajectories.trained == steps * 2 * 2
    assert found.trajectories.in_flight == 0
    delivered = [batch.column("lease")[0].as_py() for batch in read_trajectories(tmp_path / "journal")]
    assert len(delivered) == len(set(delivered))
    assert set(trained) <= set(delivered) <= set(made)


async def test_a_learner_that_dies_gets_the_same_groups_again(tmp_path: Path) -> None:
    with queue(tmp_path, staleness={"depth": 3}) as it:
        async with client(it) as rollouter:
            for lease in (await rollouter.ask(12, wait_s=5)).leases:
                await rollouter.deliver(make_trajectory(lease, reward=float(lease.member)))
        first = LearnerClient(it.url, version=0)
        firstly = [train(first, version, 2) for version in (1, 2)]
        unsettled, _ = first.take(1, 5)
        first.close()
        it.kill()  # the memory of it, too
        it.start()
        second = LearnerClient(it.url, version=1)
        assert second.welcome.version == 1
        assert train(second, 2, 2) == firstly[1]
        again, _ = second.take(1, 5)
        assert [number for number, _ in again] == [number for number, _ in unsettled]
        assert second.status().tokens.holds()
        second.close()


async def test_weights_survive_the_queue(tmp_path: Path) -> None:
    """Else a queue and a rollouter that restart together wait for a learner that waits for them."""
    with queue(tmp_path) as it:
        learner = LearnerClient(it.url, version=0)
        learner.publish(make_weights(0))
        it.kill()
        it.start()
        async with client(it) as rollouter:
            assert rollouter.welcome.weights == make_weights(0)
            assert (await rollouter.weights(-1, wait_s=0)).weights == make_weights(0)
        learner.close()


async def test_a_rollouter_that_comes_again_frees_its_leases_at_once(tmp_path: Path) -> None:
    async with in_process(tmp_path) as (broker, first):
        leases = (await first.ask(2, wait_s=5)).leases
        async with QueueClient((tmp_path / "queue.url").read_text().strip(), role="rollouter", name="a") as second:
            again = (await second.ask(2, wait_s=5)).leases
            assert [(lease.group, lease.member, lease.attempt) for lease in again] == [(0, 0, 1), (0, 1, 1)]
            late = await first.deliver(make_trajectory(leases[0]))
            assert late.duplicates == [leases[0].lease]
            assert broker.ledger.state.leases.returned == {"owner started anew": 2}


async def test_a_silent_owner_and_a_passed_deadline_free_their_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.queue.ledger.SILENCE_SECONDS", 0.7)
    async with in_process(tmp_path) as (broker, one):
        (lease,) = (await one.ask(1, wait_s=5)).leases
        await one.beat(make_beat("a", [lease.lease], tokens=9))
        async with asyncio.timeout(10), broker._changed:
            await broker._changed.wait_for(lambda: lease.lease not in broker.ledger.state.running)
        counts = broker.ledger.state.leases
        assert (counts.returned, counts.tokens_lost) == ({"owner gone": 1}, 9)
    (tmp_path / "late").mkdir()
    async with in_process(tmp_path / "late", queue={"lease_seconds": 0.1}) as (broker, one):
        await one.ask(1, wait_s=5)
        async with asyncio.timeout(10), broker._changed:
            await broker._changed.wait_for(lambda: broker.ledger.state.leases.returned == {"deadline passed": 1})


async def test_long_polls_answer_as_soon_as_there_is_something(tmp_path: Path) -> None:
    async with in_process(tmp_path, staleness={"depth": 0}) as (broker, one):
        url = (tmp_path / "queue.url").read_text().strip()
        leases = (await one.ask(99, wait_s=5)).leases
        began = time.monotonic()
        asking = asyncio.create_task(one.ask(1, wait_s=60))
        looking = asyncio.create_task(one.weights(-1, wait_s=60))
        taking = asyncio.create_task(asyncio.to_thread(_one_take, url))
        for lease in leases[:2]:
            await one.deliver(make_trajectory(lease, outcome=Outcome.INVALID, reward=None))
        assert (await asking).leases[0].group == 2  # the failed group was refunded
        for lease in leases[2:]:
            await one.deliver(make_trajectory(lease))
        assert await taking == [1]
        broker.ledger.publish(make_weights(0))
        await one.beat(make_beat("a", [lease.lease for lease in leases]))
        assert (await looking).weights == make_weights(0)
        assert time.monotonic() - began < 30
        refused = await one.ask(9, wait_s=0)
        assert "" in refused.why


def _one_take(url: str) -> list[int]:
    learner = LearnerClient(url, version=0)
    try:
        return [number for number, _ in learner.take(1, 60)[0]]
    finally:
        learner.close()


async def test_an_answer_that_was_lost_is_given_again(tmp_path: Path) -> None:
    """The same request under the same number: an ask gets the same leases, a take the same groups."""
    async with in_process(tmp_path) as (broker, one):
        context = zmq.asyncio.Context()
        raw = context.socket(zmq.DEALER)
        raw.connect((tmp_path / "queue.url").read_text().strip())

        async def twice(message: Ask | Take) -> tuple[list[bytes], list[bytes]]:
            for _ in range(2):
                await raw.send_multipart([b"12345678", msgspec.msgpack.encode(message)])
            return await raw.recv_multipart(), await raw.recv_multipart()

        first, second = await twice(Ask(name="b", room=2, wait_s=5))
        assert first == second
        granted = msgspec.msgpack.decode(first[1], type=Granted)
        assert broker.ledger.state.leases.granted == len(granted.leases) == 2
        for lease in granted.leases:
            await one.deliver(make_trajectory(lease))
        first, second = await twice(Take(room=1, held=[], wait_s=5))
        assert first == second
        assert len(first) == 2 + 2
        context.destroy(linger=0)


async def test_malformed_messages_are_refused_and_nobody_else_is_affected(tmp_path: Path) -> None:
    async with in_process(tmp_path) as (_, one):
        (lease,) = (await one.ask(1, wait_s=5)).leases
        context = zmq.asyncio.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.connect((tmp_path / "queue.url").read_text().strip())
        good = bytes(encode([make_trajectory(lease)])[0])
        ask, deliver = (msgspec.msgpack.encode(message) for message in (AskStatus(), Deliver(name="a")))
        bad = [
            [b""],
            [b"short", ask],
            [b"12345678", b"\xc1"],
            [b"12345678", b"noise" * 40],
            [b"12345678", msgspec.msgpack.encode({"type": "Nothing"})],
            [b"12345678", deliver],
            [b"12345678", deliver, b""],
            [b"12345678", deliver, good[:-200]],
            [b"12345678", deliver, good, good],
        ]
        for frames in bad:
            await stranger.send_multipart(frames)
            answer = await asyncio.wait_for(stranger.recv_multipart(), 10)
            assert b"Refused" in answer[1]
        assert (await one.status()).refused == len(bad)
        assert (await one.deliver(make_trajectory(lease))).leases == [lease.lease]
        context.destroy(linger=0)


async def test_a_full_disk_stops_grants_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.queue.broker.DISK_SECONDS", 0.05)
    async with in_process(tmp_path) as (_, one):
        leases = (await one.ask(2, wait_s=5)).leases
        real = os.writev

        tried = asyncio.Event()

        def full(fd: int, parts: list[memoryview]) -> int:
            tried.set()
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "writev", full)
        delivering = asyncio.create_task(one.deliver(make_trajectory(leases[0])))
        await tried.wait()
        assert "No space left" in (await one.status()).why
        assert "No space left" in (await one.ask(1, wait_s=0)).why
        assert not delivering.done()
        monkeypatch.setattr(os, "writev", real)
        assert (await delivering).leases == [leases[0].lease]
        assert (await one.ask(1, wait_s=5)).leases
        assert (await one.status()).why == ""
    assert len(list(read_trajectories(tmp_path / "journal"))) == 1


async def test_an_evaluation_is_granted_scored_and_told_apart(tmp_path: Path) -> None:
    async with in_process(tmp_path) as (_, one):
        await one.evaluate(0)
        leases = (await one.ask(4, wait_s=5)).leases
        assert [lease.heldout for lease in leases] == [True] * 3 + [False]
        for n, lease in enumerate(leases):
            await one.deliver(make_trajectory(lease, reward=float(n == 0)))
        status = await one.status()
        assert [(each.ended, each.passed) for each in status.heldout] == [(3, 1)]
        assert status.trajectories.generated == 1
        await one.drain(done=True)
        assert (await one.ask(1, wait_s=5)).done
    groups = [batch.column("group")[0].as_py() for batch in read_trajectories(tmp_path / "journal")]
    assert [is_heldout(group) for group in groups] == [True] * 3 + [False]


async def test_a_settlement_that_does_not_add_up_is_refused_with_its_numbers(tmp_path: Path) -> None:
    async with in_process(tmp_path) as (_, one):
        for lease in (await one.ask(2, wait_s=5)).leases:
            await one.deliver(make_trajectory(lease))

        def settle() -> None:
            learner = LearnerClient((tmp_path / "queue.url").read_text().strip(), version=0)
            try:
                ((number, batches),), _ = learner.take(1, 5)
                fates = [Fate(lease=b.column("lease")[0].as_py(), outcome="finished", trained=2) for b in batches]
                learner.settle([number], fates, 1)
            finally:
                learner.close()

        with pytest.raises(QueueRefused, match="2 trained is not its 3 sampled tokens"):
            await asyncio.to_thread(settle)


async def test_a_client_says_that_it_waits_and_gives_up_when_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("slipstream.queue.client.PATIENCE", 0.05)
    with queue(tmp_path) as it:
        async with client(it) as one:
            it.kill()
            one.give_up_after = 0.1
            with pytest.raises(QueueAway):
                await one.status()
    assert f"waiting for the queue at {it.url} for 0 s (AskStatus)" in caplog.text


def test_sigterm_stops_it_cleanly(tmp_path: Path) -> None:
    with queue(tmp_path) as it:
        assert it.stop() == 0
        assert "the journal has everything" in (tmp_path / "queue.log").read_text()


def test_other_tasks_are_refused_on_the_same_journal(tmp_path: Path) -> None:
    config = make_config()
    Broker(config, RunDir(tmp_path), TaskOrder(make_tasks(), seed=0)).close()  # its begin is not recorded yet
    asyncio.run(_begin(tmp_path))
    with pytest.raises(UserError, match="tasks"):
        Broker(config, RunDir(tmp_path), TaskOrder(make_tasks(9), seed=0))


async def _begin(root: Path) -> None:
    async with in_process(root):
        pass


def test_a_long_path_gets_a_short_socket(tmp_path: Path) -> None:
    root = tmp_path / ("x" * 90) / "run"
    root.mkdir(parents=True)
    with queue(root) as it:
        assert len(it.url) < 107
        assert it.process.poll() is None
        it.process.send_signal(signal.SIGINT)
        assert it.process.wait(10) == 0


def test_an_address_in_use_is_a_users_error(tmp_path: Path) -> None:
    taken = zmq.Context.instance().socket(zmq.ROUTER)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    with pytest.raises(UserError, match=r"queue\.listen"):
        Broker(
            make_config(queue={"listen": f"tcp://127.0.0.1:{port}"}), RunDir(tmp_path), TaskOrder(make_tasks(), seed=0)
        )
    taken.close()
