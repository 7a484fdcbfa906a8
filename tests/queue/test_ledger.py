"""The ledger under any interleaving: what was promised holds after every single event."""

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from queue_made import make_beat, make_config, make_row, make_tasks, make_weights

from slipstream.queue import events as ev
from slipstream.queue.group import Phase
from slipstream.queue.ledger import SILENCE_SECONDS, Ledger
from slipstream.queue.messages import Fate, Lease, Ok, Refused
from slipstream.queue.row import Row
from slipstream.queue.sampler import sampler
from slipstream.queue.state import LedgerState
from slipstream.queue.tasks import TaskOrder, is_heldout
from slipstream.staleness import Gate
from slipstream.trajectory import Outcome

PLACE = ev.Place(0, 16, 1000)


class Runs(RuleBasedStateMachine):
    """Two owners, a learner, a clock; everything may happen at any time."""

    @initialize(
        depth=st.sampled_from([0, 0.5, 1.0, 2.0]),
        cutoff=st.integers(0, 3),
        group=st.integers(1, 3),
        retries=st.integers(0, 2),
        epochs=st.sampled_from([None, 1, 3]),
        selection=st.sampled_from(["fifo", "window", "oldest", "fair"]),
        next_task=st.sampled_from(["shuffle", "pools"]),
        group_min=st.sampled_from([0, 2]),
    )
    def begin(
        self,
        depth: float,
        cutoff: int,
        group: int,
        retries: int,
        epochs: int | None,
        selection: str,
        next_task: str,
        group_min: int,
    ) -> None:
        self.config = make_config(
            staleness={"depth": depth, "cutoff": cutoff},
            rollout={"group": max(2, group), "group_min": group_min},
            queue={"selection": selection},
            tasks={"sampler": next_task},
            outcomes={"retries": retries},
            run={"steps": 6},
        )
        tasks = make_tasks(3) + make_tasks(2, "tt")
        for task in tasks[3:]:
            task.source = "other"
        self.order = TaskOrder(tasks, make_tasks(2, "h"), seed=0, epochs=epochs)
        self.ledger = Ledger(self.config, self.order)
        self.gate = Gate(self.config.learner.batch, depth, cutoff)
        self.log: list[ev.AnyEvent] = []
        self.replayed = LedgerState()  # from the journal's words alone
        self.now = 0.0
        self.requests = 0
        self.leases: dict[int, Lease] = {}  # all that were ever granted
        self.held: dict[int, list[int]] = {}  # by the learner: groups and their leases
        self.rows: dict[int, Row] = {}  # accepted ones
        self.trained: dict[int, int] = {}  # lease -> version, of trajectories that count as consumed
        self.top = 0  # highest version
        self.seeds: set[int] = set()
        self.parked: dict[tuple[int, int], int] = {}  # tokens, by group and member
        self.unparked = self.gone_on = 0  # parked tokens that were lost, and that trajectories have in them

    @property
    def state(self) -> LedgerState:
        return self.ledger.state

    # -- rollouters

    @rule(owner=st.sampled_from("ab"), room=st.integers(0, 5))
    def ask(self, owner: str, room: int) -> None:
        self.requests += 1
        granted = self.ledger.ask(owner, room, self.requests, self.now)
        again = self.ledger.ask(owner, room, self.requests, self.now)
        if granted.leases:
            assert again == granted
        assert len(granted.leases) <= room
        for lease in granted.leases:
            assert lease.lease not in self.leases
            assert lease.seed not in self.seeds
            assert lease.task.id[0] == ("h" if lease.heldout else "t")
            assert lease.parked == ((lease.group, lease.member) in self.parked)
            self.leases[lease.lease] = lease
            self.seeds.add(lease.seed)
        if room and not granted.leases:
            assert granted.why
        self.top = max(self.top, self.state.version)

    @precondition(lambda self: self.leases)
    @rule(
        data=st.data(),
        outcome=st.sampled_from([Outcome.FINISHED, Outcome.FINISHED, Outcome.TIMEOUT, Outcome.ENGINE_FAILED]),
        reward=st.sampled_from([0.0, 1.0, None]),
        ages=st.lists(st.integers(0, 4), max_size=4),
    )
    def deliver(self, data: st.DataObject, outcome: Outcome, reward: float | None, ages: list[int]) -> None:
        """Of any lease that ever was: a first time, again, or late."""
        running = sorted(self.state.running)
        lease = self.leases[data.draw(st.sampled_from(running if running and ages else sorted(self.leases)))]
        row = make_row(lease, [max(0, self.state.version - age) for age in ages], outcome, reward)
        if self.ledger.expects(row):
            assert lease.lease not in self.rows
            self.accept(lease, row)
        else:
            self.ledger.duplicate(row)
        assert not self.ledger.expects(row)

    @rule(owner=st.sampled_from("ab"), age=st.integers(0, 4))
    def make_a_batch(self, owner: str, age: int) -> None:
        """The ordinary course, so that runs get far."""
        self.ask(owner, 4)
        for lease in sorted(self.state.running):
            versions = [max(0, self.state.version - age), self.state.version]
            row = make_row(self.leases[lease], versions, reward=float(lease % 2))
            self.accept(self.leases[lease], row)
        self.take(2, lost=False)

    def accept(self, lease: Lease, row: Row) -> None:
        parked = self.parked.pop((lease.group, lease.member), 0)
        self.gone_on += min(parked, row.tokens)
        self.unparked += max(0, parked - row.tokens)
        self.ledger.deliver(row, PLACE)
        self.rows[lease.lease] = row

    @precondition(lambda self: self.state.running)
    @rule(data=st.data(), tokens=st.integers(1, 5))
    def park(self, data: st.DataObject, tokens: int) -> None:
        """Also an old word, which comes after a newer one."""
        lease = self.leases[data.draw(st.sampled_from(sorted(self.state.running)))]
        row = make_row(lease, [self.state.version] * tokens, Outcome.CANCELLED, None)
        assert self.ledger.expects(row)
        self.ledger.park(row, PLACE)
        where = (lease.group, lease.member)
        self.parked[where] = max(tokens, self.parked.get(where, 0))
        assert self.ledger.expects(row)

    @precondition(lambda self: self.leases)
    @rule(owner=st.sampled_from("ab"), data=st.data())
    def cannot_go_on(self, owner: str, data: st.DataObject) -> None:
        lease = self.leases[data.draw(st.sampled_from(sorted(self.leases)))]
        running = self.state.running.get(lease.lease)
        parked = self.ledger.parked(owner, lease.lease)
        self.ledger.drop_parked(owner, lease.lease)
        if running and running.owner == owner:
            tokens = self.parked.pop((lease.group, lease.member), 0)
            assert tokens == (parked.tokens if parked else 0)
            self.unparked += tokens
        else:
            assert parked is None

    @rule(owner=st.sampled_from("ab"), data=st.data())
    def give_back(self, owner: str, data: st.DataObject) -> None:
        mine = [lease for lease, running in self.state.running.items() if running.owner == owner]
        some = data.draw(st.lists(st.sampled_from(sorted(self.leases)), max_size=3)) if self.leases else []
        self.ledger.give_back(owner, some, "left")
        assert not {*some} & {*mine} & {*self.state.running}

    @rule(
        owner=st.sampled_from("ab"),
        pass_s=st.sampled_from([0.5, 11.0, SILENCE_SECONDS + 1, 200.0]),
        known=st.booleans(),
    )
    def time_passes(self, owner: str, pass_s: float, known: bool) -> None:
        self.now += pass_s
        mine = [lease for lease, running in self.state.running.items() if running.owner == owner]
        self.ledger.beat(make_beat(owner, mine if known else (), tokens=3), self.now)
        before, lost = dict(self.parked), self.state.leases.tokens_lost
        self.ledger.expire(self.now)
        for group, member in before:  # a group that closed
            if group not in self.state.groups or self.state.groups[group].members[member].closed:
                self.unparked += self.parked.pop((group, member))
        assert self.state.leases.tokens_lost - lost >= sum(before.values()) - sum(self.parked.values())
        if pass_s > SILENCE_SECONDS:
            assert all(running.owner == owner for running in self.state.running.values())

    @rule(owner=st.sampled_from("ab"))
    def rollouter_restarts(self, owner: str) -> None:
        self.requests += 1
        self.ledger.hello("rollouter", owner, self.requests, 0, self.now)
        assert all(running.owner != owner for running in self.state.running.values())

    # -- learner

    @rule(room=st.integers(0, 3), lost=st.booleans())
    def take(self, room: int, lost: bool) -> None:
        lost_ones = [group.group for group in self.state.taken() if group.group not in self.held]
        again = lost_ones + self.state.ready[: self.state.again]
        ready = self.state.ready[self.state.again :]
        numbers = [group.group for group in self.ledger.take(room, list(self.held))]
        assert numbers[: len(again)] == again[:room]
        assert set(numbers[len(again) :]) <= set(ready)
        if self.config.queue.selection == "fifo":
            assert numbers == (again + ready)[:room]
        if self.config.queue.selection != "window":
            assert len(numbers) == min(room, len(again + ready))
        assert len(numbers) == len(set(numbers)) <= room
        if not lost:
            groups = [self.state.groups[number] for number in numbers]
            self.held |= {group.group: [delivery.lease for delivery in group.deliveries()] for group in groups}

    @precondition(lambda self: self.held)
    @rule(data=st.data(), consumed=st.booleans(), cheat=st.sampled_from(["", "", "", "sum", "stale", "masked", "part"]))
    def settle(self, data: st.DataObject, consumed: bool, cheat: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        version = self.state.version + 1 if consumed else None
        fates = [self._fate(lease, version) for lease in self.held[number]]
        cheated = self._cheat(fates, version, cheat)
        before = msgspec.msgpack.encode(self.state)
        answer = self.ledger.settle([number], fates, version)
        if cheated:
            assert isinstance(answer, Refused), (cheat, fates)
            assert msgspec.msgpack.encode(self.state) == before
            return
        assert isinstance(answer, Ok), answer
        after = msgspec.msgpack.encode(self.state)
        assert self.ledger.settle([number], fates, version) == Ok()
        assert msgspec.msgpack.encode(self.state) == after
        del self.held[number]
        if version is not None:
            for fate in fates:
                assert fate.lease not in self.trained
                self.trained[fate.lease] = version

    def _fate(self, lease: int, version: int | None) -> Fate:
        row = self.rows[lease]
        fate = Fate(lease=lease, outcome=row.outcome)
        if row.outcome != Outcome.FINISHED or row.reward is None:
            fate.failed = row.tokens
        elif version is None:
            fate.zero_signal = row.tokens
        else:
            fresh = [run.length for run in row.versions if self.gate.fresh(run.version, version - 1)]
            fate.trained = sum(fresh)
            fate.masked_stale = row.tokens - fate.trained
        return fate

    def _cheat(self, fates: list[Fate], version: int | None, cheat: str) -> bool:
        """Change the fates into what must be refused; False if there is nothing to cheat with."""
        stale = next((fate for fate in fates if fate.masked_stale), None)
        masked = next((fate for fate in fates if fate.failed), None)
        if cheat == "sum":
            fates[0].masked_stale += 1
        elif cheat == "stale" and stale is not None:
            stale.trained, stale.masked_stale = stale.trained + 1, stale.masked_stale - 1
        elif cheat == "masked" and masked is not None:
            masked.trained, masked.failed = masked.failed, 0
        elif cheat == "part" and len(fates) > 1:
            fates.pop()
        else:
            return False
        return True

    @rule(skip=st.booleans())
    def publish(self, skip: bool) -> None:
        version = self.state.version + (not skip)
        if version <= 8:
            self.ledger.publish(make_weights(version))
            self.top = max(self.top, version)

    @rule()
    def checkpoint(self) -> None:
        self.ledger.checkpointed(self.state.version)

    @rule(data=st.data())
    def learner_restarts(self, data: st.DataObject) -> None:
        version = data.draw(st.integers(self.state.final, max(self.state.final, self.state.version)))
        lost = [lease for lease, of in self.trained.items() if of > version]
        consumed = [g for g in self.state.groups.values() if g.phase == Phase.CONSUMED and g.version > version]
        consumed.sort(key=lambda group: (group.version, group.taken))
        taken = [group.group for group in self.state.taken()]
        ready = list(self.state.ready)
        self.requests += 1
        self.ledger.hello("learner", "learner", self.requests, version, self.now)
        assert self.state.ready == [group.group for group in consumed] + taken + ready
        for lease in lost:
            del self.trained[lease]
        self.held = {}

    @rule(version=st.integers(0, 3))
    def evaluate(self, version: int) -> None:
        self.ledger.evaluate(version)

    @rule(done=st.booleans())
    def drain(self, done: bool) -> None:
        """Rarely: a learner's start is what ends it."""
        if self.requests % 11 == 10:
            self.ledger.drain(done)

    # -- what always holds

    @invariant()
    def events_say_it_all(self) -> None:
        if not hasattr(self, "log"):
            return
        for event in self.ledger.events:
            self.replayed.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=ev.AnyEvent))
        self.log += self.ledger.events
        self.ledger.events.clear()
        assert msgspec.msgpack.encode(self.replayed) == msgspec.msgpack.encode(self.state)
        if self.config.tasks.sampler == "pools":  # a queue that was killed goes on with the same task
            again, number = sampler("pools", self.order, 0), self.state.next_group
            for task, record in self.replayed.tasks.items():
                again.saw(task, record)
            assert again.next(number) == self.ledger._sampler.next(number)

    @invariant()
    def identities_hold(self) -> None:
        if not hasattr(self, "log"):
            return
        tokens, trajectories = self.state.accounts()
        assert tokens.holds(), tokens
        assert trajectories.holds(), trajectories
        assert self.state.lease_counts().holds()
        training = [row for row in self.rows.values() if not is_heldout(row.group)]
        assert tokens.generated == sum(row.tokens for row in training)
        assert trajectories.generated == len(training)
        flying = [
            delivery.tokens
            for group in self.state.groups.values()
            if group.phase != Phase.CONSUMED
            for delivery in group.deliveries()
        ]
        assert (tokens.in_flight, trajectories.in_flight) == (sum(flying), len(flying))
        assert self.state.leases.delivered == len(self.rows)
        places = {
            (group.group, number): member.parked.tokens
            for group in self.state.groups.values()
            for number, member in enumerate(group.members)
            if member.parked
        }
        assert places == self.parked
        assert self.state.leases.tokens_parked == sum(self.parked.values())
        assert self.state.leases.tokens_lost >= self.unparked
        assert self.state.leases.granted == len(self.leases)

    @invariant()
    def the_gate_holds(self) -> None:
        if not hasattr(self, "log"):
            return
        state = self.state
        # Groups that a learner says it consumed and that no ledger saw were not opened by this one.
        unseen = sum(event.unseen for event in self.log if isinstance(event, ev.LearnerJoined))
        assert state.accepted + state.opened <= self.gate.limit(self.top) + unseen
        assert state.accepted + state.opened <= self.config.run.steps * self.config.learner.batch + unseen
        assert state.opened == sum(g.phase == Phase.OPEN and not is_heldout(g.group) for g in state.groups.values())
        assert state.bytes_held == sum(
            PLACE.length
            for group in state.groups.values()
            if group.phase in (Phase.OPEN, Phase.READY)
            for _ in group.deliveries()
        )


Runs.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRuns = Runs.TestCase


# -- single promises


def grant(ledger: Ledger, room: int, owner: str = "a", request: int = 1) -> list[Lease]:
    return ledger.ask(owner, room, request, 0.0).leases


def make_ledger(epochs: int | None = None, heldout: int = 0, **sections: dict[str, object]) -> Ledger:
    order = TaskOrder(make_tasks(), make_tasks(heldout, "h"), seed=0, epochs=epochs)
    return Ledger(make_config(**sections), order)


def finish(ledger: Ledger, leases: list[Lease], version: int = 0) -> None:
    for n, lease in enumerate(leases):
        ledger.deliver(make_row(lease, [version] * 3, reward=float(n % 2)), PLACE)


def test_why_names_the_knob() -> None:
    ledger = make_ledger(staleness={"depth": 0.5})
    assert len(grant(ledger, 100)) == 3 * 2
    refused = ledger.ask("a", 1, 2, 0.0)
    assert refused.why == (
        "depth 0.5 is full: 0 groups accepted, 3 running, version 0; raise staleness.depth or speed up the learner"
    )


def test_memory_stops_new_groups_but_not_open_ones() -> None:
    ledger = make_ledger(queue={"memory_mb": 1}, staleness={"depth": 5})
    first, *_ = grant(ledger, 1)
    ledger.deliver(make_row(first, [0]), ev.Place(0, 16, 2 << 20))
    assert [lease.group for lease in grant(ledger, 9, request=2)] == [first.group]
    assert "queue.memory_mb" in ledger.why()


def test_an_open_group_is_filled_first_and_a_retried_member_before_it() -> None:
    ledger = make_ledger(rollout={"group": 3}, staleness={"depth": 4})
    first, second = grant(ledger, 2)
    ledger.deliver(make_row(first, [0], Outcome.TOOL_FAILED), PLACE)
    granted = grant(ledger, 3, request=2)
    assert [(lease.group, lease.member, lease.attempt) for lease in granted] == [(0, 0, 1), (0, 2, 0), (1, 0, 0)]
    assert second.seed != granted[0].seed != first.seed


def test_parked_tokens_are_lost_only_where_nobody_goes_on_from_them() -> None:
    """Five were sampled and three of them parked when the owner died; the next one goes on, to seven."""
    ledger = make_ledger()
    lease, _ = grant(ledger, 2)
    ledger.park(make_row(lease, [0] * 3, Outcome.CANCELLED, None), PLACE)
    ledger.beat(make_beat("a", [lease.lease], tokens=5), 1.0)
    ledger.give_back("a", [lease.lease], "owner gone")
    counts = ledger.state.lease_counts()
    assert (counts.tokens_lost, counts.tokens_parked) == (2, 3)
    assert ledger.parked("a", lease.lease) is None
    again, *_ = grant(ledger, 1, "b", 2)
    assert again.parked
    assert ledger.parked("a", again.lease) is None
    assert ledger.parked("b", again.lease) is not None
    ledger.deliver(make_row(again, [0] * 3 + [1] * 4), PLACE)
    counts = ledger.state.lease_counts()
    assert (counts.tokens_lost, counts.tokens_parked) == (2, 0)
    assert ledger.state.accounts()[0].generated == 7


def test_a_retry_budget_ends_in_a_mask() -> None:
    ledger = make_ledger(outcomes={"retries": 1})
    (lease, other) = grant(ledger, 2)
    ledger.deliver(make_row(lease, [0], Outcome.CANCELLED), PLACE)
    (lease,) = grant(ledger, 1, request=2)
    ledger.deliver(make_row(lease, [0], Outcome.CANCELLED), PLACE)
    ledger.deliver(make_row(other, [0]), PLACE)
    assert ledger.state.ready == [0]


def test_a_group_that_failed_as_a_whole_is_refunded() -> None:
    ledger = make_ledger(staleness={"depth": 0}, learner={"batch": 1})
    for lease in grant(ledger, 2):
        ledger.deliver(make_row(lease, [0, 0], Outcome.INVALID, None), PLACE)
    assert ledger.state.ready == []
    assert [lease.group for lease in grant(ledger, 2, request=2)] == [1, 1]
    tokens, trajectories = ledger.state.accounts()
    assert (tokens.failed, trajectories.failed) == ({"invalid": 4}, {"invalid": 2})


def test_heldout_goes_first_and_is_not_in_the_accounts() -> None:
    ledger = make_ledger(heldout=2)
    ledger.evaluate(3)
    leases = grant(ledger, 3)
    assert [(lease.heldout, lease.min_version) for lease in leases] == [(True, 3), (True, 3), (False, 0)]
    ledger.deliver(make_row(leases[0], [3] * 4, reward=1.0), PLACE)
    ledger.deliver(make_row(leases[1], [3] * 5, reward=0.5), PLACE)
    (result,) = ledger.state.heldout_results()
    assert (result.tasks, result.ended, result.passed, result.mean_reward, result.tokens) == (2, 2, 1, 0.75, 9)
    assert ledger.state.accounts()[0].generated == 0
    ledger.evaluate(3)
    assert len(ledger.state.heldout_slots) == 0


def test_a_finite_source_runs_out() -> None:
    ledger = make_ledger(epochs=1, staleness={"depth": 9})
    leases = grant(ledger, 99)
    assert len({lease.task.id for lease in leases}) == 5
    assert len(leases) == 10
    assert "tasks are out" in ledger.why()
    assert not ledger.exhausted()
    finish(ledger, leases)
    assert len(ledger.take(9, [])) == 5
    assert ledger.exhausted()


def test_the_run_generates_no_more_than_its_steps_need() -> None:
    ledger = make_ledger(run={"steps": 2}, staleness={"depth": 9})
    assert len(grant(ledger, 99)) == 2 * 2 * 2
    assert "run.steps = 2" in ledger.why()


def test_a_resumed_learner_that_an_empty_ledger_never_saw_opens_no_flood() -> None:
    """Found in another system: after a resume at version 100 the gate let in (depth + 101) batches at once."""
    ledger = make_ledger(staleness={"depth": 1})
    ledger.hello("learner", "learner", 9, 100, 0.0)
    assert len({lease.group for lease in grant(ledger, 10**4)}) == 4


def test_a_learner_that_says_nothing_is_not_said_to_do_anything() -> None:
    ledger = make_ledger()
    clock = make_beat("learner").clock
    ledger.learner_beat(clock, now=100.0)
    ledger.expire(now=100.0 + SILENCE_SECONDS)
    assert ledger.status().learner == clock
    ledger.expire(now=100.1 + SILENCE_SECONDS)
    assert ledger.status().learner is None


def test_final_consumption_is_not_handed_out_again() -> None:
    ledger = make_ledger()
    ledger.checkpointed(5)
    assert isinstance(ledger.hello("learner", "learner", 1, 4, 0.0), Refused)


@pytest.mark.parametrize("count", [1, 5, 7])
def test_every_epoch_has_every_task_once_in_another_order(count: int) -> None:
    order = TaskOrder(make_tasks(count), seed=3)
    epochs = [[names(order, epoch * count + n) for n in range(count)] for epoch in range(6)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert count == 1 or len({tuple(epoch) for epoch in epochs}) > 1
    assert [names(order, n) for n in range(3)] == [names(TaskOrder(make_tasks(count), seed=3), n) for n in range(3)]


def names(order: TaskOrder, group: int) -> str:
    task = order.train(group)
    assert task is not None
    assert order.named(group, task.id) is task
    return task.id
