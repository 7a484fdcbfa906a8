"""Clients of the queue: `QueueClient` (async: rollouters, supervisor), `LearnerClient` (blocking: the learner), and
`LearnerBeats`.

Invariant: every request is made until it is answered, under one number, and making it twice does what making it once
does (asks and hellos by number, deliveries by lease, takes by what is held, settlements by group). A queue that is away
is waited for with a line in the log every few seconds; a process that is to leave sets `give_up_after`.
"""

import asyncio
import contextlib
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from slipstream.observe.clock import Clock
from slipstream.queue import address, messages
from slipstream.queue.wire import encode, read
from slipstream.queue.wire import trajectory as made
from slipstream.trajectory import Trajectory

log = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds beyond a request's own wait before a line says so and it is made again
BEAT_SECONDS = 1.0  # between two of the learner's beats

A = TypeVar("A", bound=messages.Message)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(messages.Answer)


class QueueRefused(Exception):
    """The queue says no; its words say why. Asking again would not help."""


class QueueAway(Exception):
    """The queue did not answer within `give_up_after`."""


def _set_up(socket: Any, url: str) -> None:
    socket.set_hwm(0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)  # a peer that vanished without a word is noticed, and reconnected to
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10000)
    address.connect(socket, url)


def _number() -> bytes:
    """Of a request: no two in a run are alike, also not those of two lives of one process."""
    return secrets.token_bytes(8)


def _read(frame: Any, kind: type[A]) -> A:
    answer = _decoder.decode(frame)
    if isinstance(answer, messages.Refused):
        raise QueueRefused(answer.why)
    assert isinstance(answer, kind), f"{type(answer).__name__} instead of {kind.__name__}"
    return answer


def _say_waiting(url: str, request: messages.Request, began: float, give_up_after: float) -> None:
    seconds = time.monotonic() - began
    said = f"waiting for the queue at {url} for {seconds:.0f} s ({type(request).__name__}); is it running?"
    log.warning("%s", said)
    if seconds > give_up_after:
        raise QueueAway(said)


class QueueClient:
    """One process's connection. Use as an async context manager; requests may be made side by side."""

    welcome: messages.Welcome

    def __init__(self, url: str, *, role: str, name: str) -> None:
        self._url, self._role, self._name = url, role, name
        self._requests: dict[bytes, list[Any]] = {}  # by number: the frames of those without an answer
        self._answers: dict[bytes, asyncio.Future[Any]] = {}
        self.give_up_after = math.inf  # seconds; finite once the process is to leave, with the queue or without

    async def __aenter__(self) -> "QueueClient":
        self._context = zmq.asyncio.Context()
        self._socket: Any = self._context.socket(zmq.DEALER)  # its methods are half typed
        self._connections = self._socket.get_monitor_socket(address.CONNECTIONS)
        _set_up(self._socket, self._url)
        self._listeners = [asyncio.create_task(self._receive()), asyncio.create_task(self._ask_again())]
        try:
            hello = messages.Hello(role=self._role, name=self._name, pid=os.getpid())
            self.welcome = await self._request(hello, messages.Welcome)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        for listener in self._listeners:
            listener.cancel()
        await asyncio.wait(self._listeners)
        self._socket.disable_monitor()
        self._context.destroy(linger=500)

    async def _receive(self) -> None:
        while True:
            number, *frames = await self._socket.recv_multipart(copy=False)
            waiter = self._answers.get(number.bytes)
            if waiter is not None and not waiter.done():
                waiter.set_result([frame.buffer for frame in frames])

    async def _ask_again(self) -> None:
        """What had no answer when the connection broke is asked again as soon as there is a new one."""
        address.check_let_in(await self._connections.recv_multipart(), self._url)  # the first connection
        while True:
            address.check_let_in(await self._connections.recv_multipart(), self._url)
            log.info("connected to the queue again; %d requests are made again", len(self._requests))
            for frames in list(self._requests.values()):
                await self._socket.send_multipart(frames)

    async def _request(
        self, request: messages.Request, kind: type[A], payload: Sequence[Any] = (), wait_s: float = 0.0
    ) -> A:
        return _read((await self._frames(request, payload, wait_s))[0], kind)

    async def _frames(self, request: messages.Request, payload: Sequence[Any] = (), wait_s: float = 0.0) -> list[Any]:
        """Of the answer."""
        number = _number()
        frames = self._requests[number] = [number, _encoder.encode(request), *payload]
        waiter = self._answers[number] = asyncio.get_running_loop().create_future()
        began = time.monotonic()
        try:
            while True:
                await self._socket.send_multipart(frames)
                await asyncio.wait(
                    [waiter, *self._listeners], timeout=wait_s + PATIENCE, return_when=asyncio.FIRST_COMPLETED
                )
                if waiter.done():
                    return waiter.result()
                for listener in self._listeners:
                    if listener.done():  # nobody would hear the answer
                        listener.result()
                _say_waiting(self._url, request, began, self.give_up_after)
        finally:
            del self._requests[number], self._answers[number]

    async def ask(self, room: int, wait_s: float) -> messages.Granted:
        return await self._request(
            messages.Ask(name=self._name, room=room, wait_s=wait_s), messages.Granted, wait_s=wait_s
        )

    async def deliver(self, trajectory: Trajectory) -> messages.Accepted:
        return await self._request(messages.Deliver(name=self._name), messages.Accepted, encode([trajectory]))

    async def park(self, trajectory: Trajectory) -> None:
        """Tell how far one has come that runs."""
        await self._request(messages.Park(name=self._name), messages.Ok, encode([trajectory]))

    async def parked(self, lease: int) -> Trajectory | None:
        """How far another had come with this lease."""
        answer, *frames = await self._frames(messages.AskParked(name=self._name, lease=lease))
        _read(answer, messages.Ok)
        return made(read(frames)) if frames else None

    async def drop_parked(self, lease: int) -> None:
        await self._request(messages.DropParked(name=self._name, lease=lease), messages.Ok)

    async def give_back(self, leases: list[int], reason: str) -> None:
        await self._request(messages.GiveBack(name=self._name, leases=leases, reason=reason), messages.Ok)

    async def beat(self, beat: messages.RollouterBeat) -> None:
        await self._request(messages.Beat(beat=beat), messages.Ok)

    async def weights(self, newer_than: int, wait_s: float) -> messages.Newest:
        ask = messages.AskWeights(newer_than=newer_than, wait_s=wait_s)
        return await self._request(ask, messages.Newest, wait_s=wait_s)

    async def evaluate(self, version: int) -> None:
        await self._request(messages.Evaluate(version=version), messages.Ok)

    async def drain(self, *, done: bool) -> None:
        await self._request(messages.Drain(done=done), messages.Ok)

    async def status(self) -> messages.Status:
        return await self._request(messages.AskStatus(), messages.Status)


class LearnerClient:
    """The learner's connection: one request at a time, each call returns with its answer.

    After a `take` that came back empty, `done` says whether more will ever come.
    """

    def __init__(self, url: str, *, version: int, name: str = "learner") -> None:
        self._url = url
        self.done = False
        self.give_up_after = math.inf  # seconds; finite once the process is to leave, with the queue or without
        self._held: list[int] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._connections = self._socket.get_monitor_socket(address.CONNECTIONS)
        _set_up(self._socket, url)
        self._connected = False
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._connections, zmq.POLLIN)
        hello = messages.Hello(role="learner", name=name, pid=os.getpid(), version=version)
        try:
            self.welcome = self._request(hello, messages.Welcome)[0]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=500)

    def _request(self, request: messages.Request, kind: type[A], wait_s: float = 0.0) -> tuple[A, list[Any]]:
        frames = [_number(), _encoder.encode(request)]
        began = time.monotonic()
        while True:
            self._socket.send_multipart(frames)
            if (answer := self._answer(frames, wait_s + PATIENCE)) is not None:
                return _read(answer[0].buffer, kind), [frame.buffer for frame in answer[1:]]
            _say_waiting(self._url, request, began, self.give_up_after)

    def _answer(self, request: list[bytes], seconds: float) -> list[Any] | None:
        """The frames of the answer; asks again when the connection is a new one."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            ready = dict(self._poller.poll(int(left * 1000) + 1))
            if self._connections in ready:
                address.check_let_in(self._connections.recv_multipart(), self._url)
                if self._connected:
                    log.info("connected to the queue again")
                    self._socket.send_multipart(request)
                self._connected = True
            if self._socket in ready:
                number, *frames = self._socket.recv_multipart(copy=False)
                if number.bytes == request[0]:  # answers to requests made twice come twice
                    return frames
        return None

    def take(self, room: int, wait_s: float) -> tuple[list[tuple[int, list[Any]]], str]:
        """Up to `room` complete groups as (group, one record batch a trajectory), or none and what is waited for."""
        ask = messages.Take(room=room, held=self._held, wait_s=wait_s)
        taken, frames = self._request(ask, messages.Taken, wait_s)
        self.done = taken.done
        left = iter(frames)
        groups: list[tuple[int, list[Any]]] = []
        for group in taken.groups:
            groups.append((group.group, [read([next(left) for _ in range(count)]) for count in group.frames]))
            self._held.append(group.group)
        return groups, taken.why

    def settle(self, groups: list[int], fates: list[messages.Fate], version: int | None = None) -> None:
        self._request(messages.Settle(groups=groups, fates=fates, version=version), messages.Ok)
        gone = set(groups)
        self._held = [group for group in self._held if group not in gone]

    def publish(self, weights: messages.Weights, step: messages.StepPace | None = None) -> None:
        self._request(messages.Publish(weights=weights, step=step), messages.Ok)

    def checkpointed(self, version: int) -> None:
        self._request(messages.Checkpointed(version=version), messages.Ok)

    def status(self) -> messages.Status:
        return self._request(messages.AskStatus(), messages.Status)[0]


class LearnerBeats:
    """Tells the queue what the learner does, from a thread: the learner itself is at it for longer than a beat.

    A beat that the queue does not get is not sent again; the next one says more.
    """

    def __init__(self, url: str, clock: Clock) -> None:
        self._url, self._clock = url, clock
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="learner's beats", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing piles up for a queue that is away
            socket.setsockopt(zmq.LINGER, 0)
            _set_up(socket, self._url)
            while not self._over.wait(BEAT_SECONDS):
                beat = msgspec.msgpack.encode(messages.LearnerBeat(clock=self._clock.reading()))
                with contextlib.suppress(zmq.Again):
                    socket.send_multipart([_number(), beat], flags=zmq.NOBLOCK)
                while socket.poll(0):
                    socket.recv_multipart()
