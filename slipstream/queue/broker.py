"""The queue process: serves the ledger over ZeroMQ, journals what happens, keeps delivered trajectories for the learner.

Invariant: an answer leaves only after what it says is in the journal. A request that is malformed, contradicts the
ledger, or comes from a stranger is refused and counted; nobody else is affected. Nothing is dropped for want of room:
the queue stops granting leases instead.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from slipstream.config import Config, RunDir
from slipstream.errors import UserError
from slipstream.queue import events, messages
from slipstream.queue.journal import Journal
from slipstream.queue.ledger import Ledger, Refusal
from slipstream.queue.wire import Malformed, Row, decode, rows
from slipstream.staleness import Gate
from slipstream.staleness.seeds import sample_seed
from slipstream.task import Task

log = logging.getLogger(__name__)

OWNER_SECONDS = 15.0  # without a heartbeat, a rollouter's leases go back
UNHELD_SECONDS = 10.0  # a lease its owner does not name in a heartbeat this long after the grant was lost on the way
MOST_FRAME_BYTES = 1 << 30
SOCKET_PATH_BYTES = 100  # Unix sockets take 107


def make_ledger(config: Config, tasks: int) -> Ledger:
    return Ledger(
        gate=Gate(config.learner.batch, config.staleness.depth, config.staleness.cutoff),
        group_size=config.rollout.group,
        tasks=tasks,
        outcomes=config.outcomes,
        seed=config.run.seed,
        lease_seconds=config.queue.lease_seconds,
        byte_budget=config.queue.memory_mb << 20,
    )


def address(config: Config, run_dir: RunDir) -> str:
    """Where to bind: `queue.listen`, or a socket file in the run directory (in the system's temporary folder if its
    path would be too long for a socket)."""
    if config.queue.listen:
        return config.queue.listen
    path = run_dir.root.resolve() / "queue.sock"
    if len(str(path).encode()) > SOCKET_PATH_BYTES:
        name = hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()
        path = Path(tempfile.gettempdir()) / f"slipstream-{name}.sock"
    return f"ipc://{path}"


async def serve(config: Config, run_dir: RunDir, tasks: list[Task], heldout: list[Task]) -> None:
    """Serve until SIGTERM."""
    broker = Broker(config, run_dir, tasks, heldout)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with asyncio.TaskGroup() as group:
            serving = [group.create_task(broker.receive(group)), group.create_task(broker.watch())]
            await stop.wait()
            for task in serving:
                task.cancel()
            broker.cancel_waits()
    finally:
        broker.close()


class Broker:
    def __init__(self, config: Config, run_dir: RunDir, tasks: list[Task], heldout: list[Task]) -> None:
        self._config, self._tasks, self._heldout = config, tasks, heldout
        self._run = run_dir.root.resolve().name
        self._journal = Journal(run_dir.journal, config.queue.fsync)
        self.ledger = make_ledger(config, len(tasks))
        self._frames: dict[int, bytes] = {}  # by lease: trajectories the learner has not settled
        self._bytes = 0
        self._weights: messages.Weights | None = None
        self._beats: dict[str, messages.RollouterBeat] = {}
        self._seen: dict[str, float] = {}  # rollouter -> when it was last heard of (monotonic)
        self._pids: dict[str, int] = {}
        self.refused = 0
        self._changed = asyncio.Condition()
        self._waits: set[asyncio.Task[None]] = set()
        self._decoder = msgspec.msgpack.Decoder(messages.Request)
        self._encoder = msgspec.msgpack.Encoder()
        self._recover()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else an answer to who left is dropped without a word
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that reconnects keeps its name
        self._socket.setsockopt(zmq.MAXMSGSIZE, MOST_FRAME_BYTES)
        self._socket.set_hwm(0)
        url = address(config, run_dir)
        try:
            self._socket.bind(url)
        except zmq.ZMQError as error:
            raise UserError(f"queue.listen = {url!r}: {error.strerror}; choose an address that is free") from error
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        # Written whole, then renamed: who waits for the file never reads half of it.
        draft = run_dir.root / f".queue.url.{os.getpid()}"
        draft.write_text(bound + "\n")
        draft.rename(run_dir.root / "queue.url")
        log.info("serves %s: %d tasks, %d held out", bound, len(tasks), len(heldout))

    def _recover(self) -> None:
        count = 0
        for event in self._journal.replay():
            self.ledger.apply(event)
            count += 1
        for group in (*self.ledger.ready, *self.ledger.taken):
            for ended in self.ledger.groups[group].ended():
                if ended.where is not None:
                    self._hold(ended.lease, self._journal.read(ended.where))
        for group in self.ledger.groups.values():
            if not group.complete():
                for ended in group.ended():
                    if ended.where is not None:
                        self._hold(ended.lease, self._journal.read(ended.where))
        for running in self.ledger.running.values():
            self._seen[running.owner] = time.monotonic()
        if count:
            log.info(
                "replayed %d events: version %d, %d groups ready", count, self.ledger.version, len(self.ledger.ready)
            )

    # -- the socket ----------------------------------------------------------------------------------------------------

    async def receive(self, group: asyncio.TaskGroup) -> None:
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            identity, number = frames[0].bytes, frames[1].bytes if len(frames) > 1 else b""
            try:
                if len(frames) < 3 or len(number) != 8:
                    raise Malformed(f"{len(frames)} frames; a request is [id of 8 bytes, message, payload...]")
                request = self._decoder.decode(frames[2].buffer)
                payload = [frame.buffer for frame in frames[3:]]
            except (msgspec.DecodeError, Malformed) as error:
                await self._refuse(identity, number, str(error))
                continue
            wait = group.create_task(self._answer(identity, number, request, payload))
            self._waits.add(wait)
            wait.add_done_callback(self._waits.discard)

    async def _answer(self, identity: bytes, number: bytes, request: Any, payload: list[Any]) -> None:
        try:
            answer, frames = await self._handlers()[type(request)](request, payload)
        except (Refusal, Malformed) as error:
            await self._refuse(identity, number, f"{type(request).__name__}: {error}")
            return
        await self._send(identity, number, answer, frames)

    async def _refuse(self, identity: bytes, number: bytes, why: str) -> None:
        self.refused += 1
        log.warning("refused: %s", why)
        await self._send(identity, number, messages.Refused(why=why), [])

    async def _send(self, identity: bytes, number: bytes, answer: Any, frames: list[bytes]) -> None:
        # A client that is gone asks again when it is back.
        with contextlib.suppress(zmq.ZMQError):
            await self._socket.send_multipart([identity, number, self._encoder.encode(answer), *frames], copy=False)

    def _handlers(self) -> dict[type, Callable[[Any, list[Any]], Any]]:
        return {
            messages.Hello: self._hello,
            messages.Ask: self._ask,
            messages.Deliver: self._deliver,
            messages.GiveBack: self._give_back,
            messages.Beat: self._beat,
            messages.Publish: self._publish,
            messages.AskWeights: self._ask_weights,
            messages.Take: self._take,
            messages.Settle: self._settle,
            messages.Checkpointed: self._checkpointed,
            messages.Evaluate: self._evaluate,
            messages.Drain: self._drain,
            messages.AskStatus: self._status,
        }

    def cancel_waits(self) -> None:
        for wait in self._waits:
            wait.cancel()

    def close(self) -> None:
        self._journal.close()
        self._socket.close(linger=500)
        self._context.term()

    # -- waiting -------------------------------------------------------------------------------------------------------

    async def _record(self, happened: list[events.LedgerEvent]) -> None:
        """Journal what the ledger decided, and wake whoever waits for a change."""
        if not happened:
            return
        self._journal.append(happened)
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, attempt: Callable[[], Any], seconds: float) -> Any:
        """The first result of `attempt` that is not None, tried at each change; None after `seconds`."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                while (result := attempt()) is None:
                    await self._changed.wait()
                return result
        except TimeoutError:
            return None

    async def watch(self) -> None:
        """Leases past their deadline and rollouters not heard of: what they held goes back."""
        while True:
            await asyncio.sleep(0.5)
            self._journal.tick()
            await self._return(self.ledger.expired(time.time()), "deadline")
            now = time.monotonic()
            for owner in [owner for owner, seen in self._seen.items() if now - seen > OWNER_SECONDS]:
                await self._forget(owner, "owner gone")

    async def _forget(self, owner: str, reason: str) -> None:
        leases = [running.lease for running in self.ledger.owned(owner)]
        if leases:
            log.warning("%s: %d leases of %s go back", reason, len(leases), owner)
        await self._return(leases, reason)
        self._seen.pop(owner, None)
        self._beats.pop(owner, None)

    async def _return(self, leases: list[int], reason: str) -> None:
        tokens = {
            lease: count
            for beat in self._beats.values()
            for lease, count in zip(beat.leases, beat.tokens_in_flight, strict=False)
        }
        await self._record(self.ledger.give_back(leases, reason, tokens))

    # -- rollouters ----------------------------------------------------------------------------------------------------

    async def _hello(self, request: messages.Hello, _: list[Any]) -> tuple[Any, list[bytes]]:
        if request.role == "learner":
            await self._record(self.ledger.rewind(request.version))
            self._reload()
        elif request.role == "rollouter":
            if self._pids.get(request.name, request.pid) != request.pid:
                await self._forget(request.name, "owner restarted")
            self._pids[request.name] = request.pid
            self._seen[request.name] = time.monotonic()
        log.info("%s %s (pid %d) is here", request.role, request.name, request.pid)
        welcome = messages.Welcome(
            run=self._run, seed=self._config.run.seed, version=self.ledger.version, weights=self._weights
        )
        return welcome, []

    async def _ask(self, request: messages.Ask, _: list[Any]) -> tuple[Any, list[bytes]]:
        self._seen[request.name] = time.monotonic()
        why = ""

        def attempt() -> list[events.LedgerEvent] | None:
            nonlocal why
            if self.ledger.done:
                return []
            happened, why = self.ledger.grant(request.name, request.room, time.time(), self._bytes)
            return happened or None

        happened = await self._until(attempt, request.wait_s) or []
        await self._record(happened)
        leases = [self._lease(event) for event in happened if isinstance(event, events.Granted)]
        return messages.Granted(leases=leases, why=why, done=self.ledger.done), []

    def _lease(self, event: events.Granted) -> messages.Lease:
        group = self.ledger.groups[event.group]
        heldout = group.heldout is not None
        return messages.Lease(
            lease=event.lease,
            group=event.group,
            member=event.member,
            attempt=event.attempt,
            task=(self._heldout if heldout else self._tasks)[group.task],
            seed=sample_seed(self._config.run.seed, event.group, event.member, event.attempt, heldout),
            min_version=self.ledger.min_version(event.group),
            deadline_s=event.deadline - event.at,
            heldout=heldout,
        )

    async def _deliver(self, request: messages.Deliver, payload: list[Any]) -> tuple[Any, list[bytes]]:
        self._seen[request.name] = time.monotonic()
        batch = decode(payload)
        arrived = rows(batch)
        if len(arrived) != 1:
            raise Malformed(f"{len(arrived)} trajectories in one delivery; send one at a time")
        row = arrived[0]
        running = self.ledger.running.get(row.lease)
        if running is None:
            happened = self.ledger.deliver(row.lease, row.tokens, row.outcome, row.reward, None)
        else:
            happened = self._accept(row, payload[0], running.group)
        await self._record(happened)
        self._journal.delivered()
        duplicate = isinstance(happened[0], events.Duplicate)
        return messages.Accepted(leases=[row.lease], duplicates=[row.lease] if duplicate else []), []

    def _accept(self, row: Row, payload: Any, number: int) -> list[events.LedgerEvent]:
        group = self.ledger.groups[number]
        heldout = group.heldout is not None
        frame = bytes(payload)
        where = self._journal.append_trajectory(frame, heldout=heldout)
        happened = self.ledger.deliver(row.lease, row.tokens, row.outcome, row.reward, where)
        if number in self.ledger.groups:
            if any(ended.lease == row.lease for ended in group.ended()) and not heldout:
                self._hold(row.lease, frame)
        else:  # a held-out one that was counted, or a group that nobody can be trained on
            for ended in group.ended():
                self._release(ended.lease)
        return happened

    def _hold(self, lease: int, frame: bytes) -> None:
        if lease not in self._frames:
            self._frames[lease] = frame
            self._bytes += len(frame)

    def _release(self, lease: int) -> None:
        self._bytes -= len(self._frames.pop(lease, b""))

    def _reload(self) -> None:
        """After a rewind: trajectories that were consumed are needed again."""
        for group in self.ledger.ready:
            for ended in self.ledger.groups[group].ended():
                if ended.lease not in self._frames and ended.where is not None:
                    self._hold(ended.lease, self._journal.read(ended.where))

    async def _give_back(self, request: messages.GiveBack, _: list[Any]) -> tuple[Any, list[bytes]]:
        mine = {running.lease for running in self.ledger.owned(request.name)}
        await self._return([lease for lease in request.leases if lease in mine], request.reason)
        return messages.Ok(), []

    async def _beat(self, request: messages.Beat, _: list[Any]) -> tuple[Any, list[bytes]]:
        beat = request.beat
        self._beats[beat.name] = beat
        self._seen[beat.name] = time.monotonic()
        held = set(beat.leases)
        lost = [
            running.lease
            for running in self.ledger.owned(beat.name)
            if running.lease not in held and time.time() - running.at > UNHELD_SECONDS
        ]
        await self._return(lost, "grant lost on the way")
        return messages.Ok(), []

    async def _ask_weights(self, request: messages.AskWeights, _: list[Any]) -> tuple[Any, list[bytes]]:
        def attempt() -> messages.Weights | bool | None:
            if self.ledger.done:
                return False
            newer = self._weights is not None and self._weights.version > request.newer_than
            return self._weights if newer else None

        newest = await self._until(attempt, request.wait_s)
        return messages.Newest(weights=newest or None, done=self.ledger.done), []

    # -- the learner ---------------------------------------------------------------------------------------------------

    async def _publish(self, request: messages.Publish, _: list[Any]) -> tuple[Any, list[bytes]]:
        self._weights = request.weights
        happened = self.ledger.publish(request.weights.version)
        await self._record(happened)
        if not happened:  # version 0, or a resumed learner's: waiters for weights must hear of it all the same
            async with self._changed:
                self._changed.notify_all()
        return messages.Ok(), []

    async def _take(self, request: messages.Take, _: list[Any]) -> tuple[Any, list[bytes]]:
        await self._until(lambda: True if self.ledger.ready or self._lost(request.held) else None, request.wait_s)
        happened = self.ledger.take(request.room, request.held)
        await self._record(happened)
        taken = [group for event in happened if isinstance(event, events.Taken) for group in event.groups]
        groups, frames = [], []
        for group in taken:
            leases = [ended.lease for ended in self.ledger.groups[group].ended()]
            groups.append(messages.TakenGroup(group=group, leases=leases, frames=[1] * len(leases)))
            frames.extend(self._frames[lease] for lease in leases)
        why = "" if taken else self._why_no_group()
        return messages.Taken(groups=groups, why=why, done=self.ledger.done), frames

    def _lost(self, held: list[int]) -> bool:
        return bool(set(self.ledger.taken) - set(held))

    def _why_no_group(self) -> str:
        ledger = self.ledger
        if not self._seen:
            return "no rollouter is here"
        return (
            f"no complete group: {len(ledger.running)} trajectories run on {len(self._seen)} rollouters; "
            f"{ledger.why(self._bytes) or 'leases flow'}"
        )

    async def _settle(self, request: messages.Settle, _: list[Any]) -> tuple[Any, list[bytes]]:
        happened = self.ledger.settle(request.groups, request.fates, request.version)
        for fate in request.fates if happened else []:
            self._release(fate.lease)
        await self._record(happened)
        return messages.Ok(), []

    async def _checkpointed(self, request: messages.Checkpointed, _: list[Any]) -> tuple[Any, list[bytes]]:
        await self._record(self.ledger.checkpoint(request.version))
        return messages.Ok(), []

    # -- the supervisor ------------------------------------------------------------------------------------------------

    async def _evaluate(self, request: messages.Evaluate, _: list[Any]) -> tuple[Any, list[bytes]]:
        await self._record(self.ledger.evaluate(request.version, len(self._heldout)))
        return messages.Ok(), []

    async def _drain(self, request: messages.Drain, _: list[Any]) -> tuple[Any, list[bytes]]:
        await self._record(self.ledger.drain(request.done))
        return messages.Ok(), []

    async def _status(self, request: messages.AskStatus, _: list[Any]) -> tuple[Any, list[bytes]]:
        ledger = self.ledger
        status = messages.Status(
            version=ledger.version,
            tokens=ledger.tokens,
            trajectories=ledger.trajectories,
            leases=ledger.leases,
            groups_ready=len(ledger.ready),
            bytes_held=self._bytes,
            rollouters=list(self._beats.values()),
            heldout=list(ledger.heldout.values()),
            why=ledger.why(self._bytes),
            refused=self.refused,
        )
        return status, []
