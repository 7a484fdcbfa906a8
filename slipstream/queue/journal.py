"""The journal: what the queue must not lose, on disk, append-only.

    ledger.log              "SLPLOG1\\n", then frames of msgpack events (`events.py`)
    trajectories-NNNNN.seg  "SLPTRJ1\\n", then frames of Arrow IPC streams (`wire.py`), one delivery each
    heldout-NNNNN.seg       the same, for evaluations

A frame is [length uint32][CRC-32 uint32][payload], little-endian. Invariant: a trajectory is written before the event
that says it was delivered, and an answer to a delivery is sent after both. On opening, each file is cut at the end of
its last whole frame, and what was cut is reported.
"""

import logging
import os
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from slipstream.queue import events
from slipstream.queue.messages import Accounts, LeaseCounts

log = logging.getLogger(__name__)

LOG_HEADER, SEGMENT_HEADER = b"SLPLOG1\n", b"SLPTRJ1\n"
FRAME = struct.Struct("<II")
SEGMENT_BYTES = 256 << 20  # a new segment is begun after this much
SYNC_SECONDS = 1.0

Fsync = Literal["delivery", "interval", "never"]


class JournalError(Exception):
    """A file that is no journal of ours; says which and why."""


class FrameFile:
    """One append-only file of frames; opening cuts a torn tail."""

    def __init__(self, path: Path, header: bytes) -> None:
        self.path = path
        if not path.exists():
            path.write_bytes(header)
        end = header_checked(path, header)
        for offset, payload in read_frames(path, header):
            end = offset + FRAME.size + len(payload)
        torn = path.stat().st_size - end
        if torn:
            log.warning("%s: cut %d bytes after the last whole record at %d", path.name, torn, end)
            os.truncate(path, end)
        self.size = end
        self._file: BinaryIO = path.open("ab", buffering=0)

    def append(self, payload: Any) -> tuple[int, int]:
        """Write a frame; (offset of the payload, length)."""
        view = memoryview(payload)
        frame = FRAME.pack(view.nbytes, zlib.crc32(view))
        written = self._file.write(frame + view.tobytes() if view.nbytes < 4096 else frame)
        if view.nbytes >= 4096:
            written = self._file.write(view)
        if written is None or written < min(view.nbytes, 1):
            raise OSError(f"{self.path}: short write")
        offset = self.size + FRAME.size
        self.size = offset + view.nbytes
        return offset, view.nbytes

    def sync(self) -> None:
        os.fdatasync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def header_checked(path: Path, header: bytes) -> int:
    with path.open("rb") as file:
        found = file.read(len(header))
    if found != header:
        raise JournalError(f"{path} begins with {found!r}, not {header!r}: it was written by another version")
    return len(header)


def read_frames(path: Path, header: bytes) -> Iterator[tuple[int, bytes]]:
    """(offset of the frame, payload) of each whole frame, up to the first that is torn."""
    with path.open("rb") as file:
        file.seek(len(header))
        while True:
            offset = file.tell()
            head = file.read(FRAME.size)
            if len(head) < FRAME.size:
                return
            length, crc = FRAME.unpack(head)
            payload = file.read(length)
            if len(payload) < length or zlib.crc32(payload) != crc:
                return
            yield offset, payload


class Journal:
    """Opens (or makes) the journal of a run. `replay()` first; then append."""

    def __init__(self, folder: Path, fsync: Fsync) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._fsync = folder, fsync
        self._log = FrameFile(folder / "ledger.log", LOG_HEADER)
        self._segments = {kind: self._open_last(kind) for kind in ("trajectories", "heldout")}
        self._synced = time.monotonic()
        self._encoder = msgspec.msgpack.Encoder()

    def _open_last(self, kind: str) -> FrameFile:
        existing = sorted(self._folder.glob(f"{kind}-*.seg"))
        return FrameFile(existing[-1] if existing else self._folder / f"{kind}-00000.seg", SEGMENT_HEADER)

    def replay(self) -> Iterator[events.LedgerEvent]:
        return read_events(self._folder)

    def append_trajectory(self, payload: Any, *, heldout: bool) -> events.Locator:
        kind = "heldout" if heldout else "trajectories"
        segment = self._segments[kind]
        number = int(segment.path.stem.rpartition("-")[2])
        if segment.size > SEGMENT_BYTES:
            segment.close()
            number += 1
            segment = self._segments[kind] = FrameFile(self._folder / f"{kind}-{number:05d}.seg", SEGMENT_HEADER)
        offset, length = segment.append(payload)
        return events.Locator(number, offset, length)

    def append(self, happened: Sequence[events.LedgerEvent]) -> None:
        for event in happened:
            self._log.append(self._encoder.encode(event))

    def delivered(self) -> None:
        """Call before a delivery is acknowledged: makes it durable as the fsync policy says."""
        if self._fsync == "delivery":
            self.sync()

    def tick(self) -> None:
        if self._fsync == "interval" and time.monotonic() - self._synced > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        for file in (*self._segments.values(), self._log):  # trajectories before the events that name them
            file.sync()
        self._synced = time.monotonic()

    def read(self, where: events.Locator) -> bytes:
        """The payload of a delivered training trajectory."""
        with (self._folder / f"trajectories-{where.segment:05d}.seg").open("rb") as file:
            file.seek(where.offset)
            return file.read(where.length)

    def close(self) -> None:
        if self._fsync != "never":
            self.sync()
        for file in (*self._segments.values(), self._log):
            file.close()


def read_events(folder: Path) -> Iterator[events.LedgerEvent]:
    decoder = msgspec.msgpack.Decoder(events.LedgerEvent)
    path = folder / "ledger.log"
    header_checked(path, LOG_HEADER)
    for _, payload in read_frames(path, LOG_HEADER):
        yield decoder.decode(payload)


def read_trajectories(folder: Path, kind: Literal["trajectories", "heldout"] = "trajectories") -> Iterator[Any]:
    """Record batches of all deliveries, in the order they came; also while the run goes on."""
    from slipstream.queue.wire import decode

    for path in sorted(folder.glob(f"{kind}-*.seg")):
        for _, payload in read_frames(path, SEGMENT_HEADER):
            yield decode([payload])


class RunAccounts(msgspec.Struct):
    """The accounting identity of a run, recomputed from its journal."""

    tokens: Accounts
    trajectories: Accounts
    leases: LeaseCounts

    def holds(self) -> bool:
        return self.tokens.holds() and self.trajectories.holds() and self.leases.holds()


def accounts(folder: Path, config: Any) -> RunAccounts:
    """Replays the ledger of the journal in `folder`; `config` is the run's Config."""
    from slipstream.queue.broker import make_ledger

    ledger = make_ledger(config, tasks=1)
    for event in read_events(folder):
        ledger.apply(event)
    return RunAccounts(ledger.tokens, ledger.trajectories, ledger.leases)
