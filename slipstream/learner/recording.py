"""What a run trained on, from its journal alone: the batch and the published checksum of every version.

Invariant: batches are those of the run's last timeline: what a crash undid is not in it, and what was made again is in
it once. Groups of a batch stand in the order in which the learner had them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from slipstream.errors import UserError
from slipstream.queue import events as ev
from slipstream.queue.journal import read_events, segment_path
from slipstream.queue.messages import Fate


class RecordedGroup(msgspec.Struct, frozen=True):
    group: int
    fates: list[Fate]  # one a trajectory, in order


class Recording(msgspec.Struct):
    folder: Path  # the journal
    batches: dict[int, list[RecordedGroup]] = {}  # by the version that they made
    checksums: dict[int, list[str]] = {}  # by version: as published, each different one once
    places: dict[int, ev.Place] = {}  # by lease

    def versions(self) -> range:
        """All that can be made again, one after the other. Raises UserError when one is missing in between."""
        last = max(self.batches, default=0)
        if missing := [version for version in range(1, last + 1) if version not in self.batches]:
            raise UserError(
                f"{self.folder}: it does not say what version {missing[0]} was made of (lost in a power cut, or "
                "pruned); this run cannot be replayed"
            )
        return range(1, last + 1)

    def read(self, group: RecordedGroup) -> list[Any]:
        """One record batch a trajectory, as the learner was given them."""
        from slipstream.queue.wire import decode

        found: list[Any] = []
        for fate in group.fates:
            place = self.places[fate.lease]
            with segment_path(self.folder, place.segment).open("rb") as file:
                file.seek(place.offset)
                found.append(decode([file.read(place.length)]))
        return found


def read_recording(folder: Path) -> Recording:
    """Of a run that goes on: as of about now."""
    if not (folder / "ledger.log").is_file():
        raise UserError(f"RUN = {str(folder.parent)!r}: it has no journal; name the directory of a run")
    return recording_of(folder, (event for _, event in read_events(folder)))


def recording_of(folder: Path, events: Iterator[ev.AnyEvent]) -> Recording:
    recording = Recording(folder)
    groups: dict[int, int] = {}  # by lease
    for event in events:
        match event:
            case ev.LeasesGranted():
                groups.update((grant.lease, grant.group) for grant in event.grants)
            case ev.TrajectoryDelivered():
                recording.places[event.lease] = event.place
            case ev.FatesSettled(version=int(version)):
                recording.batches[version] = _grouped(event.fates, groups)
            case ev.WeightsPublished():
                published = recording.checksums.setdefault(event.weights.version, [])
                if event.weights.checksum not in published:
                    published.append(event.weights.checksum)
            case ev.LearnerJoined():
                for version in [version for version in recording.batches if version > event.version]:
                    del recording.batches[version]
            case _:
                pass
    return recording


def _grouped(fates: list[Fate], groups: dict[int, int]) -> list[RecordedGroup]:
    found: dict[int, list[Fate]] = {}
    for fate in fates:
        found.setdefault(groups[fate.lease], []).append(fate)
    return [RecordedGroup(group, of_group) for group, of_group in found.items()]
