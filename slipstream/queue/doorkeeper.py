"""Who is let in on TCP (ZAP, http://rfc.zeromq.org/spec:27), and a count of what is refused that fills no log.

Invariant: only the holder of the clients' key passes; a flood of refusals is one line in the log a second.
"""

import logging
import time
from typing import Any

import zmq
from zmq.utils import z85

from slipstream.queue.keys import DOMAIN

log = logging.getLogger(__name__)

LINE_SECONDS = 1.0  # between two lines about refusals


class Refusals:
    """Counts them all, says the first of each second."""

    def __init__(self) -> None:
        self.count = 0
        self._unsaid = 0
        self._said_at = -LINE_SECONDS

    def add(self, why: str) -> None:
        self.count += 1
        now = time.monotonic()
        if now - self._said_at < LINE_SECONDS:
            self._unsaid += 1
            return
        also = f" (and {self._unsaid} before it)" if self._unsaid else ""
        log.warning("refused: %s%s", why, also)
        self._unsaid, self._said_at = 0, now


class Doorkeeper:
    """Answers libzmq, which asks at every handshake whether a public key may enter."""

    def __init__(self, context: Any, known: str, refusals: Refusals) -> None:
        self._known = z85.decode(known)
        self._refusals = refusals
        self._socket: Any = context.socket(zmq.REP)
        self._socket.bind("inproc://zeromq.zap.01")

    async def serve(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            version, request, domain, address, _, mechanism, *credentials = frames
            known = (domain, mechanism, credentials) == (DOMAIN, b"CURVE", [self._known])
            if not known:
                self._refusals.add(f"a connection from {address.decode(errors='replace')}: its key is not this run's")
            status = [b"200", b"", b"client"] if known else [b"400", b"unknown key", b""]
            await self._socket.send_multipart([version, request, *status, b""])
