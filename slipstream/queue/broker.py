"""The queue process: serves the ledger over ZeroMQ and journals what happens.

Invariant: an answer leaves only after what it says is in the journal. A request that cannot be read or contradicts the
ledger is refused and counted, and nobody else is affected. Nothing is dropped for want of room: the queue stops
granting leases instead, also when the disk is full.
"""

import asyncio
import logging
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from slipstream.config import Config, RunDir
from slipstream.queue import address, keys, messages
from slipstream.queue import events as ev
from slipstream.queue.doorkeeper import Doorkeeper, Refusals
from slipstream.queue.journal import Journal
from slipstream.queue.recovery import replayed
from slipstream.queue.tasks import TaskOrder
from slipstream.queue.wire import Malformed, decode, rows, split
from slipstream.task import Task

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.5  # between two looks at deadlines and silent owners
DISK_SECONDS = 1.0  # between two attempts to write what the disk did not take
WAIT_SECONDS = 60.0  # the longest that a request waits here; its client asks again
# What one client may have at once; whoever wants more is refused, or not answered until it reads.
MOST_FRAME_BYTES = 256 << 20
MOST_REQUESTS = 4096
MOST_ANSWERS = 1000
HANDSHAKE_MS = 3000  # for a connection to say who it is
SILENT_MS = 20_000  # after which a peer that is not even alive is forgotten

T = TypeVar("T")
Reply = tuple[messages.Answer, list[Any]]  # with payload frames


async def serve(config: Config, run_dir: RunDir, tasks: list[Task], heldout: list[Task]) -> None:
    """Serve until SIGTERM or SIGINT. A journal that is there already is gone on with."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # before the address is there for others to see
        loop.add_signal_handler(number, stop.set)
    _allow_connections()
    broker = Broker(config, run_dir, TaskOrder(tasks, heldout, seed=config.run.seed))
    try:
        await broker.serve(stop)
    finally:
        broker.close()


def _allow_connections() -> None:
    """As many as the system lets this process have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Broker:
    def __init__(self, config: Config, run_dir: RunDir, order: TaskOrder) -> None:
        self._fsync, self._keep = config.queue.fsync, config.queue.keep
        self._journal = Journal(run_dir.journal)
        self._config = msgspec.json.encode(config)
        self.ledger = replayed(config, order, self._journal.recovered)
        # By group and lease: trajectories that were not taken yet. The journal has them all.
        self._frames: dict[int, dict[int, Any]] = {}
        self._unwritten: list[ev.AnyEvent] = []  # decided, and the disk did not take them yet
        self._disk_fault = ""
        self._written = self._synced = 0  # deliveries
        self._sync_lock = asyncio.Lock()
        self._changed = asyncio.Condition()
        self.refusals = Refusals()
        self._requests: Counter[bytes] = Counter()  # that have no answer yet, by client
        self._decoder = msgspec.msgpack.Decoder(messages.Request)
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.asyncio.Context()
        self._socket: Any = self._context.socket(zmq.ROUTER)  # its methods are half typed
        self._doorkeeper = self._set_up(config.queue.listen, run_dir)
        url = address.bind(self._socket, config.queue.listen, run_dir)
        log.info(
            "serves %s: version %d, %d groups ready, %d leases running, %d events replayed",
            url,
            self.ledger.state.version,
            len(self.ledger.state.ready),
            len(self.ledger.state.running),
            len(self._journal.recovered),
        )

    def _set_up(self, listen: str, run_dir: RunDir) -> Doorkeeper | None:
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else an answer to who left is dropped without a word
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * MOST_FRAME_BYTES)  # a connection that sends more is cut
        self._socket.setsockopt(zmq.SNDHWM, MOST_ANSWERS)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, SILENT_MS // 4)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
        if not address.is_tcp(listen):
            return None
        own, clients = keys.run_keys(run_dir)
        doorkeeper = Doorkeeper(self._context, clients.public, self.refusals)
        keys.lock(self._socket, own)
        return doorkeeper

    async def serve(self, stop: asyncio.Event) -> None:
        await self._record()
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(self._serve_for_ever())
            await stop.wait()
            serving.cancel()
        log.info("stops at version %d; the journal has everything", self.ledger.state.version)

    def close(self) -> None:
        if self._fsync != "never":
            self._journal.sync()
        self._journal.close()
        self._context.destroy(linger=500)

    async def _serve_for_ever(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            if self._doorkeeper is not None:
                group.create_task(self._doorkeeper.serve())
            while True:
                frames = await self._socket.recv_multipart(copy=False)
                group.create_task(self._answer(frames))

    # -- one request ---------------------------------------------------------------------------------------------------

    async def _answer(self, frames: list[Any]) -> None:
        client, number = frames[0].bytes, frames[1].bytes if len(frames) > 1 else b""
        self._requests[client] += 1
        try:
            answer, payload = await self._handle(*self._read(frames))
        except (msgspec.DecodeError, Malformed) as error:
            answer, payload = messages.Refused(why=f"malformed request: {error}"), []
        finally:
            self._requests[client] -= 1
            if not self._requests[client]:
                del self._requests[client]
        if isinstance(answer, messages.Refused):
            self.refusals.add(answer.why)
        try:  # not to wait: one that does not read would stop all the others
            parts = [client, number, self._encoder.encode(answer), *payload]
            await self._socket.send_multipart(parts, flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self.refusals.add(f"a client that reads none of {MOST_ANSWERS} answers; it may ask again once it does")
        except zmq.ZMQError:  # a client that is gone asks again under the same number when it is back
            log.debug("an answer has nobody to go to")

    def _read(self, frames: list[Any]) -> tuple[messages.Request, int, list[Any]]:
        if len(frames) < 3 or len(frames[1].bytes) != 8:
            raise Malformed(f"{len(frames)} frames; a request is [id of 8 bytes, message, payload...]")
        if self._requests[frames[0].bytes] > MOST_REQUESTS:
            raise Malformed(f"more than {MOST_REQUESTS} requests of one client at once")
        if (size := max(len(frame) for frame in frames)) > MOST_FRAME_BYTES:
            raise Malformed(f"a frame of {size} bytes; at most {MOST_FRAME_BYTES} are taken")
        return self._decoder.decode(frames[2].buffer), int.from_bytes(frames[1].bytes), frames[3:]

    async def _handle(self, request: messages.Request, number: int, payload: list[Any]) -> Reply:
        match request:
            case messages.Hello():
                return await self._hello(request, number)
            case messages.Ask():
                return await self._ask(request, number)
            case messages.Deliver():
                return await self._deliver(payload)
            case messages.Park():
                return await self._park(payload)
            case messages.AskParked():
                parked = self.ledger.parked(request.name, request.lease)
                return messages.Ok(), [self._journal.read(parked.place)] if parked else []
            case messages.AskWeights():
                return await self._ask_weights(request)
            case messages.Take():
                return await self._take(request)
            case messages.Settle():
                return await self._saved(self.ledger.settle(request.groups, request.fates, request.version))
            case messages.AskStatus():
                status = self.ledger.status(self.refusals.count)
                status.why = self._disk_fault or status.why
                return status, []
            case messages.AskConfig():
                return messages.RunConfig(config=self._config), []
            case messages.DropParked():
                self.ledger.drop_parked(request.name, request.lease)
            case messages.GiveBack():
                self.ledger.give_back(request.name, request.leases, request.reason)
            case messages.Beat():
                self.ledger.beat(request.beat, time.monotonic())
            case messages.LearnerBeat():
                self.ledger.learner_beat(request.clock, time.monotonic())
            case messages.Publish():
                self.ledger.publish(request.weights, request.step)
            case messages.Checkpointed():
                self.ledger.checkpointed(request.version)
                answer = await self._saved(messages.Ok())
                if self._keep == "checkpoint":
                    async with self._sync_lock:  # nobody forces the old log to disk meanwhile
                        self._compact()
                return answer
            case messages.Evaluate():
                self.ledger.evaluate(request.version)
            case messages.Drain():
                self.ledger.drain(request.done)
        return await self._saved(messages.Ok())

    async def _saved(self, answer: messages.Answer) -> Reply:
        await self._record()
        return answer, []

    async def _hello(self, request: messages.Hello, number: int) -> Reply:
        answer = self.ledger.hello(request.role, request.name, number, request.version, time.monotonic())
        log.info("%s %s (pid %d) is here", request.role, request.name, request.pid)
        return await self._saved(answer)

    async def _ask(self, request: messages.Ask, number: int) -> Reply:
        def attempt() -> messages.Granted | None:
            if self._disk_fault:
                return None
            granted = self.ledger.ask(request.name, request.room, number, time.monotonic())
            return granted if granted.leases or granted.done else None

        granted = await self._until(attempt, request.wait_s)
        if granted is None:
            granted = messages.Granted(leases=[], why=self._disk_fault or self.ledger.why())
        return await self._saved(granted)

    async def _ask_weights(self, request: messages.AskWeights) -> Reply:
        def attempt() -> messages.Newest | None:
            state = self.ledger.state
            # Older ones than the asker has are news too when the learner was set back to a checkpoint.
            back = state.weights is not None and state.weights.version < request.newer_than <= state.highest
            news = state.weights is not None and (state.weights.version > request.newer_than or back)
            return (
                messages.Newest(weights=state.weights if news else None, done=state.done)
                if news or state.done
                else None
            )

        return await self._until(attempt, request.wait_s) or messages.Newest(weights=None), []

    async def _deliver(self, payload: list[Any]) -> Reply:
        batch = decode([frame.buffer for frame in payload])
        # A frame of libzmq's is sent on as it is; other memory would be copied, or be minded by a thread of pyzmq's.
        frames = payload if batch.num_rows == 1 else split(batch)
        answer = messages.Accepted(leases=[])
        for row, frame in zip(rows(batch), frames, strict=True):
            place = await self._place(memoryview(frame)) if self.ledger.expects(row) else None
            if place is None or not self.ledger.expects(row):  # it may have ended while the disk was full
                self.ledger.duplicate(row)
                answer.duplicates.append(row.lease)
                continue
            self.ledger.deliver(row, place)
            answer.leases.append(row.lease)
            if row.lease in self.ledger.state.delivered:
                self._frames.setdefault(row.group, {})[row.lease] = frame
            elif row.group not in self.ledger.state.groups:
                self._frames.pop(row.group, None)
        await self._record()
        await self._durable()
        return answer, []

    async def _park(self, payload: list[Any]) -> Reply:
        batch = decode([frame.buffer for frame in payload])
        for row, frame in zip(rows(batch), split(batch), strict=True):
            if self.ledger.expects(row):
                place = await self._place(memoryview(frame))
                if self.ledger.expects(row):
                    self.ledger.park(row, place)
        return await self._saved(messages.Ok())

    async def _take(self, request: messages.Take) -> Reply:
        def attempt() -> list[messages.TakenGroup] | None:
            groups = self.ledger.take(request.room, request.held)
            return groups if groups or self.ledger.exhausted() else None

        groups = await self._until(attempt, request.wait_s) or []
        frames: list[Any] = []
        for group in groups:
            here = self._frames.pop(group.group, {})
            frames += [here.get(lease) or self._journal.read(self.ledger.place(lease)) for lease in group.leases]
        await self._record()
        why = "" if groups else self._disk_fault or self.ledger.waiting_for()
        return messages.Taken(groups=groups, why=why, done=not groups and self.ledger.exhausted()), frames

    # -- waiting -------------------------------------------------------------------------------------------------------

    async def _until(self, attempt: Callable[[], T | None], seconds: float) -> T | None:
        """The first result of `attempt` that is not None, tried at each change; None after `seconds`."""
        if (at_once := attempt()) is not None or seconds <= 0:
            return at_once
        try:
            async with asyncio.timeout(min(WAIT_SECONDS, seconds)), self._changed:
                while (result := attempt()) is None:
                    await self._changed.wait()
                return result
        except TimeoutError:
            return None

    async def _record(self) -> None:
        """Return once all that was decided so far is written; wakes whoever waits for a change."""
        if not self.ledger.events and not self._unwritten:
            return
        self._unwritten += self.ledger.events
        self.ledger.events.clear()

        def write() -> None:
            self._journal.append(self._unwritten)
            self._unwritten.clear()

        await self._on_disk(write)
        await self._notify()

    def _compact(self) -> None:
        """Let go of what no crash of the learner would need. What cannot be done now is done at a later checkpoint."""
        if self.ledger.events or self._unwritten:
            return
        try:
            freed = self._journal.compact(self.ledger.state)
        except OSError as error:
            log.warning("the journal is not compacted: %s", error.strerror)
            return
        log.info("the journal begins at version %d now; %d MB went", self.ledger.state.final, freed >> 20)

    async def _place(self, frame: Any) -> ev.Place:
        return await self._on_disk(lambda: self._journal.append_trajectory(frame))

    async def _on_disk(self, write: Callable[[], T]) -> T:
        """`write`, again and again while the disk does not take it; meanwhile no lease is granted."""
        began = time.monotonic()
        while True:
            try:
                result = write()
            except OSError as error:
                self._disk_fault = f"the journal cannot be written: {error.strerror}; make room on its disk"
                log.error("waiting for the disk for %.0f s: %s", time.monotonic() - began, self._disk_fault)
                await asyncio.sleep(DISK_SECONDS)
                continue
            if self._disk_fault:
                log.info("the journal can be written again")
                self._disk_fault = ""
                await self._notify()
            return result

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _durable(self) -> None:
        """With fsync = "delivery": on disk before it is acknowledged. One fsync serves all that wait for one."""
        self._written += 1
        mine = self._written
        if self._fsync != "delivery":
            return
        async with self._sync_lock:
            if self._synced < mine:
                up_to = self._written
                await asyncio.to_thread(self._journal.sync)
                self._synced = up_to

    async def _watch(self) -> None:
        """Deadlines, silent owners, and the fsync of every second."""
        synced = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            self.ledger.expire(now)
            for number in self._frames.keys() - self.ledger.state.groups.keys():  # closed, and nothing to train on
                del self._frames[number]
            await self._record()
            if self._fsync == "interval" and now - synced >= 1.0:
                async with self._sync_lock:
                    await asyncio.to_thread(self._journal.sync)
                synced = now
