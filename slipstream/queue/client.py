"""Clients of the queue: `QueueClient` (async: rollouters, supervisor), `LearnerClient` (blocking: the learner).

Invariant: every request is made until it is answered, under one request id, and making it twice does what making it
once does (deliveries by lease, takes by what is held, settlements by group). A queue that is away is waited for, with a
line in the log every few seconds; it is never waited for in silence.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from slipstream.queue import messages
from slipstream.queue.wire import decode, encode
from slipstream.trajectory import Trajectory

log = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds beyond a request's own wait before it is made again

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(messages.Answer)


class QueueRefused(Exception):
    """The queue says no; its words say why. Asking again would not help."""


class QueueClient:
    """One process's connection. Use as an async context manager; requests may be made side by side."""

    def __init__(self, url: str, *, role: str, name: str) -> None:
        self._url, self._role, self._name = url, role, name
        self._numbers = itertools.count()
        self._answers: dict[bytes, asyncio.Future[list[Any]]] = {}

    async def __aenter__(self) -> "QueueClient":
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"{self._name}-{os.getpid()}".encode())
        self._socket.set_hwm(0)
        self._socket.connect(self._url)
        self._receiver = asyncio.create_task(self._receive())
        hello = messages.Hello(role=self._role, name=self._name, pid=os.getpid())
        self.welcome: messages.Welcome = await self._request(hello)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._receiver.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._receiver
        self._socket.close(linger=500)
        self._context.term()

    async def _receive(self) -> None:
        while True:
            number, *frames = await self._socket.recv_multipart(copy=False)
            waiter = self._answers.get(number.bytes)
            if waiter is not None and not waiter.done():
                waiter.set_result(frames)

    async def _request(self, request: messages.Request, payload: Sequence[Any] = (), wait_s: float = 0.0) -> Any:
        number = next(self._numbers).to_bytes(8)
        frames = [number, _encoder.encode(request), *payload]
        waiter = self._answers[number] = asyncio.get_running_loop().create_future()
        began = time.monotonic()
        try:
            while True:
                await self._socket.send_multipart(frames, copy=False)
                done, _ = await asyncio.wait([waiter], timeout=wait_s + PATIENCE)
                if done:
                    return _read(waiter.result()[0].buffer)
                _say_waiting(self._url, request, time.monotonic() - began)
        finally:
            del self._answers[number]

    async def ask(self, room: int, wait_s: float) -> messages.Granted:
        return await self._request(messages.Ask(name=self._name, room=room, wait_s=wait_s), wait_s=wait_s)

    async def deliver(self, trajectory: Trajectory) -> messages.Accepted:
        return await self._request(messages.Deliver(name=self._name), encode([trajectory]))

    async def give_back(self, leases: list[int], reason: str) -> None:
        await self._request(messages.GiveBack(name=self._name, leases=leases, reason=reason))

    async def beat(self, beat: messages.RollouterBeat) -> None:
        await self._request(messages.Beat(beat=beat))

    async def weights(self, newer_than: int, wait_s: float) -> messages.Newest:
        return await self._request(messages.AskWeights(newer_than=newer_than, wait_s=wait_s), wait_s=wait_s)

    async def evaluate(self, version: int) -> None:
        await self._request(messages.Evaluate(version=version))

    async def drain(self, *, done: bool) -> None:
        await self._request(messages.Drain(done=done))

    async def status(self) -> messages.Status:
        return await self._request(messages.AskStatus())


class LearnerClient:
    """The learner's connection: one request at a time, each call returns with its answer."""

    def __init__(self, url: str, *, version: int) -> None:
        self._url = url
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"learner-{os.getpid()}".encode())
        self._socket.set_hwm(0)
        self._socket.connect(url)
        self._numbers = itertools.count()
        self._held: list[int] = []
        self.welcome: messages.Welcome = self._request(
            messages.Hello(role="learner", name="learner", pid=os.getpid(), version=version)
        )[0]

    def _request(self, request: messages.Request, wait_s: float = 0.0) -> tuple[Any, list[Any]]:
        number = next(self._numbers).to_bytes(8)
        began = time.monotonic()
        while True:
            self._socket.send_multipart([number, _encoder.encode(request)])
            again = time.monotonic() + wait_s + PATIENCE
            while (left := again - time.monotonic()) > 0:
                if not self._socket.poll(int(left * 1000) + 1):
                    continue
                found, *frames = self._socket.recv_multipart(copy=False)
                if found.bytes == number:  # answers to requests made twice come twice
                    return _read(frames[0].buffer), [frame.buffer for frame in frames[1:]]
            _say_waiting(self._url, request, time.monotonic() - began)

    def take(self, room: int, wait_s: float) -> tuple[list[tuple[int, list[Any]]], str]:
        """Up to `room` complete groups as (group, one record batch a trajectory), or none and what is waited for."""
        taken, frames = self._request(messages.Take(room=room, held=self._held, wait_s=wait_s), wait_s)
        groups: list[tuple[int, list[Any]]] = []
        at = 0
        for group in taken.groups:
            batches = []
            for count in group.frames:
                batches.append(decode(frames[at : at + count]))
                at += count
            groups.append((group.group, batches))
            self._held.append(group.group)
        return groups, taken.why

    def settle(self, groups: list[int], fates: list[messages.Fate], version: int | None = None) -> None:
        self._request(messages.Settle(groups=groups, fates=fates, version=version))
        gone = set(groups)
        self._held = [group for group in self._held if group not in gone]

    def publish(self, weights: messages.Weights) -> None:
        self._request(messages.Publish(weights=weights))

    def checkpointed(self, version: int) -> None:
        self._request(messages.Checkpointed(version=version))

    def status(self) -> messages.Status:
        return self._request(messages.AskStatus())[0]

    def close(self) -> None:
        self._socket.close(linger=500)
        self._context.term()


def _read(frame: Any) -> Any:
    answer = _decoder.decode(frame)
    if isinstance(answer, messages.Refused):
        raise QueueRefused(answer.why)
    return answer


def _say_waiting(url: str, request: messages.Request, seconds: float) -> None:
    log.warning("waiting for the queue at %s for %.0f s (%s); is it running?", url, seconds, type(request).__name__)
