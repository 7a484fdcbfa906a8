"""What became of a trajectory, also after crashes, retries and compaction."""

from pathlib import Path

import pytest
from viewer_world import World

from slipstream.queue import events as ev
from slipstream.queue.journal import read_events
from slipstream.queue.messages import Fate
from slipstream.trajectory import Outcome
from slipstream.viewer.story import Story, read_stories

PLACE = ev.Place(0, 0, 0)


def by_lease(world: World) -> dict[int, Story]:
    return {story.lease: story for story in read_stories(world.run_dir.journal)}


def test_what_a_crash_undid_is_not_used_yet(world: World) -> None:
    for lease in (1, 2, 3):
        world.deliver(world.trajectory(lease, lease))
    world.train(1, 1)
    world.train(2, 2)
    world.settle(Fate(lease=3, outcome="finished", zero_signal=3))
    world.journal.append([ev.LearnerJoined("learner", 1, 1, 0)])
    stories = by_lease(world)
    assert [stories[lease].named(0) for lease in (1, 2, 3)] == ["trained", "not used yet", "zero signal"]
    assert [stories[lease].step for lease in (1, 2, 3)] == [1, None, None]
    world.train(2, 2)
    assert (by_lease(world)[2].step, by_lease(world)[2].judged) == (2, 1)


def test_staleness_is_against_the_version_that_judged(world: World) -> None:
    world.deliver(world.trajectory(1, 1), world.trajectory(2, 2))
    world.publish(7)
    world.settle(Fate(lease=1, outcome="finished", zero_signal=3))
    world.train(9, 2)
    assert [story.judged for story in by_lease(world).values()] == [7, 8]


def test_a_failure_that_is_tried_again_is_no_failure_of_its_group(world: World) -> None:
    world.deliver(world.trajectory(1, 1, outcome=Outcome.TOOL_FAILED), verdict="retry")
    world.deliver(world.trajectory(2, 1))
    assert [story.named(1) for story in by_lease(world).values()] == ["failed, tried again", "not used yet"]


@pytest.mark.parametrize(
    ("counts", "name"),
    [
        ({"trained": 3}, "trained"),
        ({"trained": 2, "masked_stale": 1}, "trained in part"),
        ({"trained": 2, "masked_mismatch": 1}, "trained in part"),
        ({"masked_mismatch": 3}, "mismatch"),
        ({"discarded_stale": 3}, "too old"),
        ({"masked_stale": 3}, "too old"),
        ({"zero_signal": 3}, "zero signal"),
        ({"failed": 3}, "failed"),
    ],
)
def test_fates_by_name(counts: dict[str, int], name: str) -> None:
    assert Story(1, PLACE, "train", Fate(lease=1, outcome="finished", **counts)).named(0) == name


def test_a_journal_that_was_compacted(models: Path, tmp_path: Path) -> None:
    """The trajectories that are still there keep their fates."""
    world = World(tmp_path / "run", models / "stable")
    world.journal.append([ev.LearnerJoined("learner", 1, 0, 0)])
    for group in (0, 1, 2):
        world.journal.append([ev.GroupOpened(group, f"task-{group}", 1)])
        world.deliver(world.trajectory(group + 1, group))
    world.journal.append([ev.GroupsTaken([0, 1])])
    world.train(1, 1)
    world.train(2, 2)
    world.journal.append([ev.ConsumptionFinal(1)])
    world.compact()
    world.close()
    assert isinstance(next(event for _, event in read_events(world.run_dir.journal)), ev.Snapshot)
    stories = by_lease(world)
    assert {lease: (story.named(0), story.step) for lease, story in stories.items()} == {
        2: ("trained", 2),
        3: ("not used yet", None),
    }
