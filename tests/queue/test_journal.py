"""Whatever byte the disk ends at, the journal opens with what is whole, says what it cut, and can be written on."""

import errno
import os
import random
from pathlib import Path

import msgspec
import pytest
from queue_made import make_config, make_tasks, make_trajectory

from slipstream.config import RunDir
from slipstream.errors import UserError
from slipstream.queue import accounts, delivered_leases, encode, is_heldout, read_trajectories
from slipstream.queue import events as ev
from slipstream.queue.journal import HEADER_BYTES, Journal, read_events
from slipstream.queue.ledger import Ledger
from slipstream.queue.messages import Fate
from slipstream.queue.row import Row
from slipstream.queue.state import LedgerState
from slipstream.queue.tasks import TaskOrder
from slipstream.queue.wire import decode, rows
from slipstream.trajectory import Outcome


def record(folder: Path) -> Ledger:
    """Two groups of two and an evaluation: delivered, taken, one of them settled."""
    ledger = Ledger(make_config(), TaskOrder(make_tasks(), make_tasks(1, "h"), seed=0))
    journal = Journal(folder)
    ledger.evaluate(0)
    for lease in ledger.ask("a", 5, 1, 0.0).leases:
        frame = encode([make_trajectory(lease)])[0]
        ledger.deliver(rows(decode([frame]))[0], journal.append_trajectory(frame))
    (group,) = ledger.take(1, [])
    ledger.settle([group.group], [Fate(lease=lease, outcome="finished", trained=3) for lease in group.leases], 1)
    journal.append(ledger.events)
    journal.close()
    return ledger


def opened(folder: Path) -> tuple[list[ev.AnyEvent], int]:
    journal = Journal(folder)
    journal.close()
    return journal.recovered, journal.torn


def test_a_journal_gives_its_events_back(tmp_path: Path) -> None:
    ledger = record(tmp_path)
    assert opened(tmp_path) == (ledger.events, 0)
    batches = list(read_trajectories(tmp_path))
    assert [is_heldout(batch.column("group")[0].as_py()) for batch in batches] == [True] + [False] * 4
    leases = [batch.column("lease")[0].as_py() for batch in batches]
    assert delivered_leases(tmp_path) == leases
    assert [batch.column("lease")[0].as_py() for batch in read_trajectories(tmp_path, {leases[3]})] == [leases[3]]


def cuts(ends: list[int], size: int) -> list[int]:
    """Where a file of `size` bytes is torn: at each of its records' ends, a byte to either side, and some by chance."""
    near = {cut for end in [0, HEADER_BYTES, *ends, size] for cut in (end - 1, end, end + 1)}
    return sorted(cut for cut in near | {*random.Random(0).sample(range(size), 20)} if 0 <= cut <= size)


def test_a_log_torn_at_any_byte_opens_with_its_whole_events(tmp_path: Path) -> None:
    events = record(tmp_path).events
    log, segment = tmp_path / "ledger.log", tmp_path / "trajectories-00000.arrow"
    whole_log, whole_segment = log.read_bytes(), segment.read_bytes()
    ends = [end for end, _ in read_events(tmp_path)]
    for size in cuts(ends, len(whole_log)):
        log.write_bytes(whole_log[:size])
        segment.write_bytes(whole_segment)
        found, _ = opened(tmp_path)
        assert found == events[: sum(end <= size for end in ends)]
        assert opened(tmp_path) == (found, 0)
        delivered = sum(isinstance(event, ev.TrajectoryDelivered) for event in found)
        assert len(list(read_trajectories(tmp_path))) == delivered


def test_a_segment_torn_at_any_byte_takes_the_log_back_with_it(tmp_path: Path) -> None:
    events = record(tmp_path).events
    log, segment = tmp_path / "ledger.log", tmp_path / "trajectories-00000.arrow"
    whole_log, whole_segment = log.read_bytes(), segment.read_bytes()
    places = [event.place for event in events if isinstance(event, ev.TrajectoryDelivered)]
    for size in cuts([place.offset + place.length for place in places], len(whole_segment)):
        log.write_bytes(whole_log)
        segment.write_bytes(whole_segment[:size])
        found, torn = opened(tmp_path)
        whole = sum(place.offset + place.length <= size for place in places)
        assert sum(isinstance(event, ev.TrajectoryDelivered) for event in found) == whole
        assert (torn > 0) == (size < len(whole_segment))
        assert len(list(read_trajectories(tmp_path))) == whole


def test_a_flipped_bit_cuts_there(tmp_path: Path) -> None:
    events = record(tmp_path).events
    log = tmp_path / "ledger.log"
    damaged = bytearray(log.read_bytes())
    damaged[-3] ^= 16
    log.write_bytes(damaged)
    found, torn = opened(tmp_path)
    assert found == events[:-1]
    assert torn > 0


def test_a_trajectory_that_no_event_names_is_cut_and_not_read(tmp_path: Path) -> None:
    """The queue died between the two writes; the trajectory was not acknowledged and will be delivered again."""
    record(tmp_path)
    journal = Journal(tmp_path)
    journal.append_trajectory(b"x" * 100)
    journal.close()
    assert len(list(read_trajectories(tmp_path))) == 5
    assert opened(tmp_path)[1] == 108


def test_segments_follow_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.queue.journal.SEGMENT_BYTES", 1000)
    ledger = record(tmp_path)
    assert len(list(tmp_path.glob("*.arrow"))) > 2
    assert opened(tmp_path) == (ledger.events, 0)
    assert len(list(read_trajectories(tmp_path))) == 5


def test_a_write_that_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = record(tmp_path)
    journal = Journal(tmp_path)
    real, calls = os.writev, iter(range(99))

    def full(fd: int, parts: list[memoryview]) -> int:
        if next(calls):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, [parts[0], parts[1][:3]])

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space"):
        journal.append([ev.Drained(False)])
    monkeypatch.undo()
    journal.append([ev.Drained(True)])
    journal.close()
    assert opened(tmp_path) == ([*ledger.events, ev.Drained(True)], 0)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(UserError, match="another queue"):
        Journal(tmp_path)
    journal.close()


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ledger.log").write_bytes(b"SLPLOG9\nxxxxxxxx")
    with pytest.raises(UserError, match="another version"):
        Journal(tmp_path)


def test_accounts_come_from_the_journal_alone(tmp_path: Path) -> None:
    ledger = record(tmp_path / "journal")
    found = accounts(RunDir(tmp_path))
    assert found.holds()
    assert (found.tokens.generated, found.tokens.trained, found.tokens.in_flight) == (12, 6, 6)
    assert (found.tokens, found.trajectories) == ledger.state.accounts()
    assert found.leases == ledger.state.lease_counts()


def test_accounts_notice_what_is_missing(tmp_path: Path) -> None:
    record(tmp_path / "journal")
    segment = tmp_path / "journal" / "trajectories-00000.arrow"
    (first, *_) = [e for _, e in read_events(tmp_path / "journal") if isinstance(e, ev.TrajectoryDelivered)][1:]
    other = bytearray(segment.read_bytes())
    # Another trajectory, of fewer sampled tokens, where the ledger says this one is.
    start, end = first.place.offset, first.place.offset + first.place.length
    batch = decode([bytes(other[start:end])])
    lease = ledger_lease(batch)
    shorter = bytes(encode([make_trajectory(lease, versions=(0,), prompt=4)])[0])
    assert len(shorter) <= end - start
    other[start:end] = shorter.ljust(end - start, b"\0")
    segment.write_bytes(other)
    assert not accounts(RunDir(tmp_path)).holds()


def ledger_lease(batch: object) -> "object":
    from slipstream.queue.messages import Lease

    row = rows(batch)[0]
    task = next(task for task in make_tasks() if task.id == row.task)
    return Lease(
        lease=row.lease,
        group=row.group,
        member=0,
        attempt=row.attempt,
        task=task,
        seed=0,
        min_version=0,
        deadline_s=1.0,
    )


def test_accounts_of_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no journal"):
        accounts(RunDir(tmp_path))


def test_what_is_parked_is_whole_and_is_no_delivery(tmp_path: Path) -> None:
    ledger = record(tmp_path / "journal")
    ledger.events.clear()
    (lease,) = ledger.ask("a", 1, 9, 0.0).leases
    journal, batch = Journal(tmp_path / "journal"), encode([make_trajectory(lease, outcome=Outcome.CANCELLED)])
    ledger.park(rows(decode(batch))[0], journal.append_trajectory(batch[0]))
    journal.append(ledger.events)
    journal.close()
    assert accounts(RunDir(tmp_path)).holds()
    assert len(list(read_trajectories(tmp_path / "journal"))) == 5
    segment = tmp_path / "journal" / "trajectories-00000.arrow"
    whole = segment.read_bytes()
    found, torn = opened(tmp_path / "journal")
    assert (found[-1], torn, segment.read_bytes()) == (ledger.events[-1], 0, whole)
    segment.write_bytes(whole[:-1])
    found, torn = opened(tmp_path / "journal")
    assert found[-1] == ledger.events[-2]
    assert torn > 0


# -- compaction ------------------------------------------------------------------------------------------------------


def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.queue.journal.SEGMENT_BYTES", 1000)  # less than one trajectory has


def compacted(folder: Path) -> Ledger:
    """As `record`, then a checkpoint, then the journal without what that made final."""
    ledger = record(folder)
    ledger.events.clear()
    ledger.checkpointed(1)
    journal = Journal(folder)
    journal.append(ledger.events)
    ledger.events.clear()
    journal.compact(ledger.state)
    journal.close()
    return ledger


def replayed(folder: Path) -> LedgerState:
    state = LedgerState()
    for event in opened(folder)[0]:
        state.apply(event)
    return state


def test_compacting_keeps_what_a_crash_needs_and_the_accounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_segments(monkeypatch)
    ledger = compacted(tmp_path / "journal")
    assert len(list((tmp_path / "journal").glob("*.arrow"))) == 2  # of five: one group of two lives
    assert opened(tmp_path / "journal")[1] == 0
    assert msgspec.msgpack.encode(replayed(tmp_path / "journal")) == msgspec.msgpack.encode(ledger.state)
    living = [delivery.lease for delivery in ledger.state.living()]
    assert len(living) == 2
    assert delivered_leases(tmp_path / "journal") == living
    assert [ledger_row(batch).lease for batch in read_trajectories(tmp_path / "journal")] == living
    found = accounts(RunDir(tmp_path))
    assert found.holds()
    assert (found.tokens, found.trajectories) == ledger.state.accounts()
    assert found.trajectories.generated == 4
    assert 0 < found.space.living < found.space.trajectories


def ledger_row(batch: object) -> Row:
    return rows(batch)[0]


def test_what_is_parked_outlives_a_compaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_segments(monkeypatch)
    ledger = compacted(tmp_path)
    (lease, *others) = ledger.ask("a", 2, 9, 0.0).leases
    journal, frame = Journal(tmp_path), encode([make_trajectory(lease, outcome=Outcome.CANCELLED)])[0]
    ledger.park(rows(decode([frame]))[0], journal.append_trajectory(frame))
    for other in others:  # a segment follows
        late = encode([make_trajectory(other)])[0]
        ledger.deliver(rows(decode([late]))[0], journal.append_trajectory(late))
    journal.append(ledger.events)
    journal.compact(ledger.state)
    journal.close()
    parked = replayed(tmp_path).member(lease.lease).parked
    assert parked is not None
    again = Journal(tmp_path)
    assert again.read(parked.place) == bytes(frame)
    again.close()


def test_a_compacted_journal_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_segments(monkeypatch)
    folder = tmp_path / "journal"
    ledger = compacted(folder)
    for _ in range(2):
        journal = Journal(folder)
        for lease in ledger.ask("a", 2, len(ledger.state.last_grants) + ledger.state.next_lease, 0.0).leases:
            frame = encode([make_trajectory(lease)])[0]
            ledger.deliver(rows(decode([frame]))[0], journal.append_trajectory(frame))
        journal.append(ledger.events)
        ledger.events.clear()
        journal.close()
        assert msgspec.msgpack.encode(replayed(folder)) == msgspec.msgpack.encode(ledger.state)
        assert accounts(RunDir(tmp_path)).holds()
        journal = Journal(folder)
        journal.compact(ledger.state)
        assert [journal.read(d.place) for d in ledger.state.living()]
        journal.close()


def test_a_log_that_was_compacted_and_torn_opens_with_what_is_whole(tmp_path: Path) -> None:
    compacted(tmp_path)
    log = tmp_path / "ledger.log"
    whole = log.read_bytes()
    journal = Journal(tmp_path)
    journal.append([ev.Drained(False), ev.Drained(True)])
    journal.close()
    longer = log.read_bytes()
    for size in range(len(whole), len(longer) + 1):
        log.write_bytes(longer[:size])
        found, _ = opened(tmp_path)
        assert isinstance(found[0], ev.Snapshot)
        assert len(list(read_trajectories(tmp_path))) == 2


def test_a_disk_that_is_full_leaves_the_journal_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = record(tmp_path)
    before = (tmp_path / "ledger.log").read_bytes()
    journal = Journal(tmp_path)

    def full(fd: int, parts: list[memoryview]) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space"):
        journal.compact(ledger.state)
    monkeypatch.undo()
    assert (tmp_path / "ledger.log").read_bytes() == before
    assert not (tmp_path / "ledger.log.new").exists()
    journal.append([ev.Drained(True)])
    journal.close()
    assert opened(tmp_path) == ([*ledger.events, ev.Drained(True)], 0)


def test_a_log_of_format_1_is_read_and_gone_on_with(tmp_path: Path) -> None:
    ledger = record(tmp_path)
    log = tmp_path / "ledger.log"
    log.write_bytes(b"SLPLOG1\n" + log.read_bytes()[8:])
    assert opened(tmp_path) == (ledger.events, 0)
    journal = Journal(tmp_path)
    journal.append([ev.Drained(True)])
    journal.compact(ledger.state)
    journal.close()
    assert log.read_bytes().startswith(b"SLPLOG2\n")
