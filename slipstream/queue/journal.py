"""The journal: what the queue must not lose, on disk, append-only.

    ledger.log                "SLPLOG2\\n", then frames of msgpack events (`events.py`)
    trajectories-NNNNN.arrow  "SLPTRJ1\\n", then frames of Arrow IPC streams (`wire.py`), one trajectory each

A frame is [length uint32][CRC-32 uint32][payload], little-endian. Invariant: a trajectory is written before the event
that says it was delivered, so the log says what counts: opening cuts it at the last whole event whose trajectory is
whole too, cuts the segments at the last trajectory it names, and reports both. Compacting puts a log that begins with a
snapshot in the place of the old one in one step, and only then deletes segments.

Logs of format 1 (no snapshot, no closed group) are read and gone on with.
"""

import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slipstream.errors import UserError
from slipstream.queue import events as ev
from slipstream.queue.state import LedgerState

log = logging.getLogger(__name__)

LOG_HEADERS, SEGMENT_HEADERS = (b"SLPLOG2\n", b"SLPLOG1\n"), (b"SLPTRJ1\n",)  # the first is what is written
HEADER_BYTES = 8
FRAME = struct.Struct("<II")
SEGMENT_BYTES = 256 << 20  # a new segment is begun after this much

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ev.AnyEvent)


class FrameFile:
    """An append-only file of frames. An append that fails leaves no part of itself behind."""

    def __init__(self, path: Path, headers: Sequence[bytes]) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self.size = os.fstat(self._fd).st_size
        try:
            if self.size < HEADER_BYTES:  # new, or torn while it was made
                os.ftruncate(self._fd, 0)
                self.size = 0
                self._write([memoryview(headers[0])])
                _sync_folder(path.parent)
            _check_header(path, headers)
        except BaseException:
            os.close(self._fd)
            raise

    def append(self, payloads: Sequence[Any]) -> int:
        """Write a frame for each payload, all or none; the offset of the first payload. Raises OSError."""
        parts: list[memoryview] = []
        for payload in payloads:
            view = memoryview(payload).cast("B")
            parts += [memoryview(FRAME.pack(view.nbytes, zlib.crc32(view))), view]
        offset = self.size + FRAME.size
        self._write(parts)
        return offset

    def _write(self, parts: list[memoryview]) -> None:
        left = parts
        try:
            while left:
                written = os.writev(self._fd, left[:64])  # a system call takes only so many, and may write less
                while left and written >= left[0].nbytes:
                    written -= left[0].nbytes
                    left = left[1:]
                if written:
                    left = [left[0][written:], *left[1:]]
        except OSError:
            os.ftruncate(self._fd, self.size)
            raise
        self.size += sum(part.nbytes for part in parts)

    def cut(self, size: int) -> int:
        """The bytes cut off."""
        torn = self.size - size
        if torn:
            os.ftruncate(self._fd, size)
            self.size = size
        return torn

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{self.path}: another queue writes it; stop that one, or use another --dir") from None

    def rename(self, path: Path) -> None:
        self.path.rename(path)
        self.path = path

    def close(self) -> None:
        os.close(self._fd)


def _sync_folder(folder: Path) -> None:
    """A file is on disk once its name is."""
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _check_header(path: Path, headers: Sequence[bytes]) -> None:
    with path.open("rb") as file:
        _check(path, file.read(HEADER_BYTES), headers)


def _check(path: Path, found: bytes, headers: Sequence[bytes]) -> None:
    if found not in headers:
        raise UserError(f"{path} begins with {found!r}, not {headers[0]!r}: another version wrote it; use a new --dir")


def read_frames(path: Path, headers: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
    """(offset of the payload, payload) of each whole frame, up to the first that is torn."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < HEADER_BYTES:
            return
        _check(path, file.read(HEADER_BYTES), headers)
        while len(head := file.read(FRAME.size)) == FRAME.size:
            length, crc = FRAME.unpack(head)
            payload = file.read(length)
            if not length or len(payload) < length or zlib.crc32(payload) != crc:
                return
            yield file.tell() - length, payload


def read_events(folder: Path) -> Iterator[tuple[int, ev.AnyEvent]]:
    """(where it ends in the log, event), in order; also while the run goes on."""
    path = folder / "ledger.log"
    for offset, payload in read_frames(path, LOG_HEADERS):
        try:
            yield offset + len(payload), _decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise UserError(
                f"{path}: another version wrote the event at {offset} ({error}); use a new --dir"
            ) from error


def segment_path(folder: Path, segment: int) -> Path:
    return folder / f"trajectories-{segment:05d}.arrow"


def named(events: Iterable[tuple[int, ev.AnyEvent]]) -> Iterator[tuple[int, ev.Place]]:
    """(lease, place) of every trajectory that the log names, in the order they came."""
    for _, event in events:
        if isinstance(event, ev.TrajectoryDelivered):
            yield event.lease, event.place
        elif isinstance(event, ev.Snapshot):
            state = LedgerState()
            state.apply(event)
            yield from ((delivery.lease, delivery.place) for delivery in state.living())


def delivered_leases(folder: Path) -> list[int]:
    """The lease numbers of all trajectories that are there, in the order they came."""
    return [lease for lease, _ in named(read_events(folder))]


def read_trajectories(folder: Path, leases: Container[int] | None = None) -> Iterator[Any]:
    """Every trajectory that is there, or those of `leases` alone, as a record batch of one row, in their order; also
    while the run goes on. `slipstream.queue.is_heldout(group)` tells the evaluations'."""
    for lease, place in named(read_events(folder)):
        if leases is None or lease in leases:
            yield read_trajectory(folder, place)


def read_trajectory(folder: Path, place: ev.Place) -> Any:
    from slipstream.queue.wire import decode

    with segment_path(folder, place.segment).open("rb") as file:
        file.seek(place.offset)
        return decode([file.read(place.length)])


class Journal:
    """Opens (or makes) the journal of a run, alone; `recovered` is what it holds."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._log = FrameFile(folder / "ledger.log", LOG_HEADERS)
        self._log.lock()
        self.recovered, end, ends = self._whole_events()
        torn = self._log.cut(end)
        for segment, path in _segments(folder).items():
            if segment in ends:
                file = FrameFile(path, SEGMENT_HEADERS)
                torn += file.cut(ends[segment])
                file.close()
            else:
                torn += max(0, path.stat().st_size - HEADER_BYTES)
                path.unlink()
        if torn:
            log.warning("%s: cut %d bytes that were torn or that no event names", folder, torn)
        self.torn = torn
        self._number = max(ends, default=0)
        self._ends = ends  # of the segments before the current one
        self._segment = FrameFile(segment_path(folder, self._number), SEGMENT_HEADERS)

    def _whole_events(self) -> tuple[list[ev.AnyEvent], int, dict[int, int]]:
        """The events up to the first whose trajectory is missing, where they end, and where each segment's
        trajectories end. Only the last segment can be torn: the ones before were forced to disk."""
        whole = {number: path.stat().st_size for number, path in _segments(self._folder).items()}
        if whole:
            last = max(whole)
            frames = read_frames(segment_path(self._folder, last), SEGMENT_HEADERS)
            whole[last] = max((offset + len(payload) for offset, payload in frames), default=0)
        found: list[ev.AnyEvent] = []
        end, ends = HEADER_BYTES, dict[int, int]()
        for after, event in read_events(self._folder):
            if isinstance(event, ev.TrajectoryDelivered | ev.TrajectoryParked):
                place = event.place
                if place.offset + place.length > whole.get(place.segment, 0):
                    log.warning(
                        "%s: the trajectory of lease %d is torn; the log ends before it", self._folder, event.lease
                    )
                    break
                ends[place.segment] = place.offset + place.length
            elif isinstance(event, ev.Snapshot):
                ends |= event.ends
            found.append(event)
            end = after
        return found, end, ends

    def append_trajectory(self, payload: Any) -> ev.Place:
        """Raises OSError, with nothing written, when the disk takes it not."""
        if self._segment.size > SEGMENT_BYTES:
            self._segment.sync()
            following = FrameFile(segment_path(self._folder, self._number + 1), SEGMENT_HEADERS)
            self._ends[self._number] = self._segment.size
            self._segment.close()
            self._segment, self._number = following, self._number + 1
        offset = self._segment.append([payload])
        return ev.Place(self._number, offset, memoryview(payload).nbytes)

    def append(self, happened: Sequence[ev.AnyEvent]) -> None:
        """All or none. Raises OSError."""
        self._log.append([_encoder.encode(event) for event in happened])

    def compact(self, state: LedgerState) -> int:
        """Put a snapshot in the place of all events so far; the bytes of trajectories that went. Raises OSError, with
        the journal as it was, when the disk takes it not."""
        self._segment.sync()
        snapshot = state.snapshot({**self._ends, self._number: self._segment.size})
        following = self._new_log(snapshot)
        following.rename(self._folder / "ledger.log")
        self._log.close()
        self._log = following
        _sync_folder(self._folder)
        gone = [number for number in self._ends if number not in snapshot.ends]
        self._ends = {number: end for number, end in snapshot.ends.items() if number != self._number}
        freed = 0
        for number in gone:
            path = segment_path(self._folder, number)
            freed += path.stat().st_size
            path.unlink()
        return freed

    def _new_log(self, snapshot: ev.Snapshot) -> FrameFile:
        """On disk and locked before it gets the log's name."""
        draft = self._folder / "ledger.log.new"
        draft.unlink(missing_ok=True)
        made: FrameFile | None = None
        try:
            made = FrameFile(draft, LOG_HEADERS)
            made.lock()
            made.append([_encoder.encode(snapshot)])
            made.sync()
        except OSError:
            if made is not None:
                made.close()
            draft.unlink(missing_ok=True)
            raise
        return made

    def sync(self) -> None:
        """Force what was written to disk: trajectories before the events that name them."""
        self._segment.sync()
        self._log.sync()

    def read(self, place: ev.Place) -> bytes:
        with segment_path(self._folder, place.segment).open("rb") as file:
            file.seek(place.offset)
            return file.read(place.length)

    def close(self) -> None:
        self._segment.close()
        self._log.close()


def _segments(folder: Path) -> dict[int, Path]:
    return {int(path.stem.rpartition("-")[2]): path for path in sorted(folder.glob("trajectories-*.arrow"))}
