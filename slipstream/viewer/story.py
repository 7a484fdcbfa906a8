"""What became of each delivered trajectory, from the ledger's events alone.

Invariant: fates are those of the run's last timeline: what a crash of the learner undid counts as not settled yet.
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from slipstream.errors import UserError
from slipstream.queue import events as ev
from slipstream.queue.group import Group, Phase
from slipstream.queue.journal import read_events
from slipstream.queue.messages import Fate
from slipstream.queue.state import LedgerState
from slipstream.queue.tasks import is_heldout


class Story(msgspec.Struct):
    lease: int
    place: ev.Place
    verdict: str  # "train" | "mask" | "retry": what its outcome's policy came to
    fate: Fate | None = None
    step: int | None = None  # the version that it was consumed for
    judged: int | None = None  # the learner's version when its fate was decided

    def named(self, group: int) -> str:
        """Its fate in a word or two, as the page filters by."""
        if is_heldout(group):
            return "held-out"
        if self.verdict == "retry":
            return "failed, tried again"
        fate = self.fate
        if fate is None:
            return "failed" if self.verdict == "mask" else "not used yet"
        if fate.trained:
            return "trained in part" if fate.masked_stale or fate.masked_mismatch else "trained"
        reasons = {
            "failed": fate.failed,
            "zero signal": fate.zero_signal,
            "too old": fate.discarded_stale + fate.masked_stale,
            "mismatch": fate.masked_mismatch,
        }
        return max(reasons, key=lambda reason: reasons[reason])


def read_stories(journal: Path) -> list[Story]:
    """In the order in which they were delivered; of a run that goes on, as of about now. Raises UserError."""
    if not (journal / "ledger.log").is_file():
        raise UserError(f"RUN = {str(journal.parent)!r}: it has no journal; name the directory of a run")
    return stories_of(event for _, event in read_events(journal))


def stories_of(events: Iterable[ev.AnyEvent]) -> list[Story]:
    found: dict[int, Story] = {}
    version = 0
    for event in events:
        match event:
            case ev.Snapshot():
                state = LedgerState()
                state.apply(event)
                version = state.version
                kept = sorted((s for group in state.groups.values() for s in _kept(group)), key=lambda s: s.lease)
                found = {story.lease: story for story in kept}
            case ev.TrajectoryDelivered():
                found[event.lease] = Story(event.lease, event.place, event.verdict)
            case ev.FatesSettled():
                for fate in event.fates:
                    if story := found.get(fate.lease):
                        story.fate, story.step = fate, event.version
                        story.judged = version if event.version is None else event.version - 1
            case ev.WeightsPublished():
                version = event.weights.version
            case ev.LearnerJoined():
                version = event.version
                for story in found.values():
                    if story.step is not None and story.step > event.version:
                        story.fate = story.step = story.judged = None
            case _:
                pass
    return list(found.values())


def _kept(group: Group) -> Iterable[Story]:
    """Of a journal that was compacted."""
    step = group.version if group.phase == Phase.CONSUMED else None
    judged = None if step is None else step - 1
    return [Story(d.lease, d.place, d.verdict, d.fate, step, judged) for d in group.deliveries()]
