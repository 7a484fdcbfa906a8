"""Which groups come next, and what becomes of a group whose time is over."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_made import make_beat, make_config, make_row, make_tasks

from slipstream.queue import events as ev
from slipstream.queue.group import Group
from slipstream.queue.ledger import Ledger
from slipstream.queue.memory import budget, there_is
from slipstream.queue.messages import Fate, Lease, Ok
from slipstream.queue.selection import Fair
from slipstream.queue.state import CLOSED, LedgerState
from slipstream.queue.tasks import TaskOrder
from slipstream.trajectory import Outcome

PLACE = ev.Place(0, 16, 100)


def make_ledger(**sections: dict[str, object]) -> Ledger:
    return Ledger(make_config(**sections), TaskOrder(make_tasks(9), seed=0))


def opened(ledger: Ledger, groups: int) -> dict[int, list[Lease]]:
    """The leases of so many new groups of two."""
    leases = ledger.ask("a", 2 * groups, 1, 0.0).leases
    return {group: [lease for lease in leases if lease.group == group] for group in range(groups)}


def finish(ledger: Ledger, leases: list[Lease], version: int = 0) -> None:
    for lease in leases:
        ledger.deliver(make_row(lease, [version, version]), PLACE)


def taken(ledger: Ledger, room: int, held: list[int]) -> list[int]:
    return [group.group for group in ledger.take(room, held)]


@pytest.mark.parametrize(
    ("selection", "first", "second"),
    [("fifo", [5, 1], [0, 2]), ("window", [1, 0], [2]), ("oldest", [2, 1], [5, 0])],
)
def test_policies(selection: str, first: list[int], second: list[int]) -> None:
    """Six groups of at most six ahead: the window is two wide. They end in the order 5, 1, 0, 2."""
    ledger = make_ledger(queue={"selection": selection}, staleness={"depth": 2, "cutoff": 9})
    groups = opened(ledger, 6)
    for group, version in ((5, 3), (1, 1), (0, 4), (2, 0)):
        finish(ledger, groups[group], version)
    assert taken(ledger, 2, []) == first
    assert taken(ledger, 9, first)[: len(second)] == second


def test_the_window_says_what_it_waits_for_and_lets_all_out_in_the_end() -> None:
    ledger = make_ledger(queue={"selection": "window"}, staleness={"depth": 2})
    groups = opened(ledger, 6)
    for group in range(1, 6):
        finish(ledger, groups[group])
    assert taken(ledger, 9, []) == [1]
    assert "queue.selection = window holds 4 complete groups back until group 0" in ledger.waiting_for()
    assert not ledger.exhausted()
    finish(ledger, groups[0])
    assert taken(ledger, 9, [1]) == [0, 2, 3, 4, 5]


def test_the_window_waits_for_nothing_once_the_run_drains() -> None:
    ledger = make_ledger(queue={"selection": "window"}, staleness={"depth": 2})
    groups = opened(ledger, 6)
    finish(ledger, groups[5])
    ledger.drain(done=False)
    assert taken(ledger, 9, []) == [5]


@pytest.mark.parametrize("selection", ["fifo", "window", "oldest", "fair"])
def test_what_is_handed_out_again_keeps_its_order(selection: str) -> None:
    ledger = make_ledger(queue={"selection": selection}, staleness={"depth": 2, "cutoff": 9})
    groups = opened(ledger, 3)
    for group, version in ((1, 2), (0, 1)):
        finish(ledger, groups[group], version)
    first = taken(ledger, 9, [])
    finish(ledger, groups[2], 0)
    assert taken(ledger, 1, []) == first[:1]
    assert taken(ledger, 9, first[:1]) == [first[1], 2]


# -- several datasets ------------------------------------------------------------------------------------------------

SHARES = st.dictionaries(st.sampled_from("abc"), st.integers(1, 5), min_size=1)


def fair(shares: dict[str, int]) -> Fair:
    return Fair({name: share / sum(shares.values()) for name, share in shares.items()}, lambda task: task)


def of(tasks: list[str]) -> LedgerState:
    return LedgerState(groups={number: Group(number, task, []) for number, task in enumerate(tasks)})


@given(SHARES, st.data())
@settings(max_examples=60, deadline=None)
def test_fair_turns_lose_nothing_and_keep_each_datasets_order(shares: dict[str, int], data: st.DataObject) -> None:
    """Whatever is ready, and in whatever portions it is taken."""
    tasks = data.draw(st.lists(st.sampled_from(sorted(shares)), max_size=30))
    state, policy, at_once = of(tasks), fair(shares), fair(shares)
    ready, chosen = list(range(len(tasks))), list[int]()
    while ready:
        room = data.draw(st.integers(1, 7))
        some = policy.select(state, ready, room)
        assert len(some) == min(room, len(ready))
        chosen += some
        ready = [group for group in ready if group not in some]
    for name in shares:
        mine = [group for group in chosen if tasks[group] == name]
        assert mine == [group for group, task in enumerate(tasks) if task == name]
    assert chosen == at_once.select(state, list(range(len(tasks))), len(tasks))


@given(SHARES, st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_datasets_with_groups_ready_have_their_shares(shares: dict[str, int], room: int) -> None:
    """To two groups each, however many of the others wait."""
    names = sorted(shares)
    tasks = [names[0]] * 500 + [name for name in names for _ in range(60)]
    chosen = fair(shares).select(of(tasks), list(range(len(tasks))), room)
    for name, share in shares.items():
        had = sum(tasks[group] == name for group in chosen)
        assert abs(had - room * share / sum(shares.values())) <= 2


def test_a_fair_ledger_knows_where_its_tasks_come_from() -> None:
    tasks = make_tasks(12)
    for task in tasks[:3]:
        task.source = "slow"
    ledger = Ledger(make_config(queue={"selection": "fair"}, staleness={"depth": 9}), TaskOrder(tasks, seed=1))
    leases = ledger.ask("a", 24, 1, 0.0).leases
    finish(ledger, sorted(leases, key=lambda lease: (lease.task.source, lease.group)))  # the slow ones last
    groups = {lease.group: lease.task.source for lease in leases}
    assert [groups[group] for group in taken(ledger, 8, [])].count("slow") == 2
    assert len(taken(ledger, 99, [])) == 12  # the 8 are not held, and come again


# -- groups whose time is over ---------------------------------------------------------------------------------------


def late_ledger(ended: int, **rollout: object) -> tuple[Ledger, list[Lease]]:
    """A group of four of which so many ended before its time was over."""
    ledger = make_ledger(rollout={"group": 4, **rollout}, queue={"lease_seconds": 200.0}, staleness={"depth": 5})
    leases = ledger.ask("a", 3, 1, 0.0).leases  # the fourth was not granted
    finish(ledger, leases[:ended])
    ledger.beat(make_beat("a", [lease.lease for lease in leases[ended:]], tokens=7), 195.0)
    return ledger, leases


def test_a_group_goes_on_with_those_that_ended() -> None:
    ledger, leases = late_ledger(2, group_min=2)
    ledger.expire(199.0)
    assert not ledger.state.ready
    ledger.expire(201.0)
    assert taken(ledger, 1, []) == [0]
    counts = ledger.state.lease_counts()
    assert counts.holds()
    # Its lease's own deadline passed first; the lease that waited to be granted anew is gone with the group.
    assert sum(counts.returned.values()) == 1
    assert counts.tokens_lost == 7
    assert not ledger.state.new_slots
    assert not ledger.state.retried_slots
    late = make_row(leases[2], [0, 0])
    assert not ledger.expects(late)
    ledger.duplicate(late)
    assert ledger.state.lease_counts().duplicates == 1
    fates = [Fate(lease=lease.lease, outcome="finished", trained=2) for lease in leases[:2]]
    assert ledger.settle([0], fates, 1) == Ok()
    tokens, trajectories = ledger.state.accounts()
    assert tokens.holds()
    assert (trajectories.generated, trajectories.trained) == (2, 2)


def test_a_lease_that_runs_when_its_group_goes_on_is_counted() -> None:
    """One that was granted anew has time left of its own; the group has not."""
    ledger, leases = late_ledger(2, group_min=2)
    ledger.give_back("a", [leases[2].lease], "left")
    assert len(ledger.ask("a", 1, 2, 195.0).leases) == 1
    ledger.expire(201.0)
    assert ledger.state.lease_counts().returned == {"left": 1, CLOSED: 1}
    assert ledger.state.lease_counts().holds()
    assert taken(ledger, 1, []) == [0]


def test_too_few_are_waited_for() -> None:
    ledger, _ = late_ledger(1, group_min=2)
    ledger.expire(201.0)
    assert not ledger.state.ready
    again = ledger.ask("a", 1, 2, 202.0).leases
    assert [(lease.group, lease.attempt) for lease in again] == [(0, 1)]
    finish(ledger, again)
    ledger.expire(203.0)
    assert ledger.state.ready == [0]


def test_without_group_min_all_are_waited_for() -> None:
    ledger, _ = late_ledger(3)
    ledger.expire(10_000.0)
    assert not ledger.state.ready


def test_a_group_whose_ended_members_failed_leaves_with_its_place() -> None:
    ledger = make_ledger(rollout={"group": 3, "group_min": 2}, staleness={"depth": 0}, learner={"batch": 1})
    leases = ledger.ask("a", 3, 1, 0.0).leases
    for lease in leases[:2]:
        ledger.deliver(make_row(lease, [0], Outcome.INVALID, None), PLACE)
    ledger.expire(1000.0)
    assert not ledger.state.groups
    assert [lease.group for lease in ledger.ask("a", 1, 2, 1001.0).leases] == [1]


# -- capacity --------------------------------------------------------------------------------------------------------


def test_groups_without_signal_refund_their_place_at_once() -> None:
    """Found in another system: groups that its filter dropped kept their place, until generation stood still."""
    ledger = make_ledger(staleness={"depth": 0}, learner={"batch": 1})
    request = 1
    for group in range(50):
        leases = ledger.ask("a", 9, request, 0.0).leases
        assert [lease.group for lease in leases] == [group, group]
        finish(ledger, leases)
        (one,) = ledger.take(1, [])
        fates = [Fate(lease=lease, outcome="finished", zero_signal=2) for lease in one.leases]
        assert ledger.settle([one.group], fates, None) == Ok()
        request += 1
    assert ledger.state.accounts()[1].zero_signal == 100


def test_the_memory_is_a_quarter_unless_said() -> None:
    assert budget(3) == 3 << 20
    assert budget(0) == there_is() // 4 > 0
    assert Ledger(make_config(), TaskOrder(make_tasks(), seed=0)).status().bytes_most == budget(0)


def test_a_full_memory_is_said_once_and_names_the_knob(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    ledger = make_ledger(queue={"memory_mb": 1}, staleness={"depth": 5})
    leases = ledger.ask("a", 2, 1, 0.0).leases
    for lease in leases:
        ledger.deliver(make_row(lease, [0]), ev.Place(0, 16, 1 << 20))
    ledger.expire(1.0)
    ledger.expire(2.0)
    assert caplog.text.count("raise queue.memory_mb") == 1
    assert ledger.ask("a", 1, 2, 2.0).why.startswith("memory is full: 2 MB of 1")
    ledger.take(1, [])
    ledger.expire(3.0)
    assert "there is memory again" in caplog.text
