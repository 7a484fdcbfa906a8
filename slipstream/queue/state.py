"""The ledger's state and how events change it; nothing here decides anything.

Invariant: the state is a function of the events alone: no config, no clock, no task data. A lease is in `running` from
its grant until the one event that ends it; a delivered trajectory's sampled tokens are in exactly one account.
"""

import math
from collections.abc import Iterable, Iterator
from typing import assert_never

import msgspec

from slipstream.queue import events as ev
from slipstream.queue.group import Delivery, Group, HeldoutTally, Member, Parked, Phase, Running, Slot, TaskRecord, held
from slipstream.queue.messages import Accounts, Fate, HeldoutResult, LeaseCounts, Weights
from slipstream.queue.tasks import heldout_version, is_heldout

CLOSED = "group closed"  # why a lease ended whose group went on without it
FATES = ("trained", "masked_stale", "masked_mismatch", "zero_signal", "discarded_stale", "failed")


class LedgerState(msgspec.Struct):
    begun: ev.RunBegun | None = None
    version: int = 0  # the learner's
    highest: int = 0  # version that was ever published
    depth: float | None = None  # the autopilot's last; None: it has not moved
    final: int = 0  # consumption up to here is in a checkpoint
    weights: Weights | None = None
    next_lease: int = 1
    next_group: int = 0
    groups: dict[int, Group] = {}
    running: dict[int, Running] = {}
    delivered: dict[int, Slot] = {}  # by lease, as long as the group lives
    heldout_slots: list[Slot] = []  # that wait for a grant, in order
    retried_slots: list[Slot] = []
    new_slots: list[Slot] = []
    ready: list[int] = []  # as they became complete
    again: int = 0  # how many of those are handed out again: at the front, in the order of the first time
    with_learner: dict[int, None] = {}  # taken groups, in the order they were
    accepted: int = 0  # groups completed since the start, refunded ones aside
    opened: int = 0  # groups being made: the gate's `running`
    consumed: int = 0
    takes: int = 0
    last_grants: dict[str, ev.LeasesGranted] = {}  # by owner
    hellos: dict[str, int] = {}  # request of each process's Hello
    draining: bool = False
    done: bool = False
    bytes_held: int = 0  # delivered and not taken
    tokens: Accounts = msgspec.field(default_factory=Accounts)
    trajectories: Accounts = msgspec.field(default_factory=Accounts)
    leases: LeaseCounts = msgspec.field(default_factory=LeaseCounts)  # held-out ones too
    heldout: dict[int, HeldoutTally] = {}  # by version
    tasks: dict[str, TaskRecord] = {}  # of groups that are rated

    def apply(self, event: ev.AnyEvent) -> None:
        match event:
            case ev.RunBegun():
                self.begun = event
            case ev.Snapshot():
                self._restore(event)
            case ev.GroupOpened():
                self._open(event)
            case ev.EvaluationOpened():
                self._evaluate(event)
            case ev.LeasesGranted():
                self._grant(event)
            case ev.LeaseReturned():
                self._return(event)
            case ev.TrajectoryDelivered():
                self._deliver(event)
            case ev.GroupClosed():
                self._close(event)
            case ev.TrajectoryParked():
                self._park(event)
            case ev.ParkedDropped():
                self.leases.tokens_lost += self._unpark(self.member(event.lease))
            case ev.DuplicateArrived():
                self.leases.duplicates += 1
            case ev.GroupsTaken():
                self._take(event)
            case ev.GroupsUntaken():
                self._ready_again([self.groups[number] for number in event.groups])
            case ev.FatesSettled():
                self._settle(event)
            case ev.WeightsPublished():
                self.weights, self.version = event.weights, event.weights.version
                self.highest = max(self.highest, self.version)
            case ev.DepthMoved():
                self.depth = event.depth
            case ev.RollouterJoined():
                self.hellos[event.name] = event.request
            case ev.LearnerJoined():
                self._rewind(event)
            case ev.ConsumptionFinal():
                self.final = max(self.final, event.version)
                self._forget([g for g in self.groups.values() if g.phase == Phase.CONSUMED and g.version <= self.final])
            case ev.Drained():
                self.draining, self.done = True, event.done
            case _:
                assert_never(event)

    # -- compaction ----------------------------------------------------------------------------------------------------

    def snapshot(self, ends: dict[int, int]) -> ev.Snapshot:
        """`ends`: of all segments that there are; those without a trajectory that lives are left out of it."""
        live = list(self.living())
        segments = {place.segment for place in self._places()} | {max(ends, default=0)}
        return ev.Snapshot(
            state=msgspec.msgpack.encode(self),
            ends={segment: end for segment, end in ends.items() if segment in segments},
            gone_tokens=self.tokens.generated - sum(delivery.tokens for delivery in live),
            gone_trajectories=self.trajectories.generated - len(live),
        )

    def _restore(self, event: ev.Snapshot) -> None:
        before = msgspec.msgpack.decode(event.state, type=LedgerState)
        for name in self.__struct_fields__:
            setattr(self, name, getattr(before, name))

    def _places(self) -> Iterator[ev.Place]:
        """All that is needed yet."""
        yield from (delivery.place for delivery in self.living())
        yield from (m.parked.place for group in self.groups.values() for m in group.members if m.parked)

    def living(self) -> Iterator[Delivery]:
        """Trajectories that may be handed out yet, or again, in the order of their leases."""
        for _, slot in sorted(self.delivered.items()):
            delivery = self.groups[slot.group].members[slot.member].delivery
            assert delivery is not None
            yield delivery

    # -- leases --------------------------------------------------------------------------------------------------------

    def _open(self, event: ev.GroupOpened) -> None:
        members = [Member() for _ in range(event.size)]
        self.groups[event.group] = Group(event.group, event.task, members, rated=event.rated)
        if event.rated:
            self.tasks.setdefault(event.task, TaskRecord()).opened = event.group
        self.new_slots.extend(Slot(event.group, member) for member in range(event.size))
        self.next_group = event.group + 1
        self.opened += 1

    def _evaluate(self, event: ev.EvaluationOpened) -> None:
        self.heldout[event.version] = HeldoutTally(tasks=len(event.tasks))
        for group, task in enumerate(event.tasks, event.first):
            self.groups[group] = Group(group, task, [Member()])
            self.heldout_slots.append(Slot(group, 0))

    def _grant(self, event: ev.LeasesGranted) -> None:
        for grant in event.grants:
            slot = Slot(grant.group, grant.member)
            next(slots for slots in self._waiting() if slot in slots).remove(slot)
            self.running[grant.lease] = Running(slot, grant.attempt, event.owner)
            self.next_lease = grant.lease + 1
        self.last_grants[event.owner] = event
        self.leases.granted += len(event.grants)

    def _waiting(self) -> Iterable[list[Slot]]:
        return (self.heldout_slots, self.retried_slots, self.new_slots)

    def _end(self, lease: int) -> tuple[Slot, Group, Member]:
        slot = self.running.pop(lease).slot
        group = self.groups[slot.group]
        return slot, group, group.members[slot.member]

    def _grant_anew(self, slot: Slot, member: Member) -> None:
        member.attempt += 1
        if is_heldout(slot.group):
            self.heldout_slots.insert(0, slot)
        else:
            self.retried_slots.append(slot)

    def _return(self, event: ev.LeaseReturned) -> None:
        slot, _, member = self._end(event.lease)
        self._grant_anew(slot, member)
        _add(self.leases.returned, event.reason, 1)
        self.leases.tokens_lost += event.tokens

    def member(self, lease: int) -> Member:
        """Of a running lease."""
        slot = self.running[lease].slot
        return self.groups[slot.group].members[slot.member]

    def _park(self, event: ev.TrajectoryParked) -> None:
        member = self.member(event.lease)
        self._unpark(member)
        member.parked = Parked(event.tokens, event.place)
        self.leases.tokens_parked += event.tokens

    def _unpark(self, member: Member) -> int:
        """The tokens that are parked no more."""
        tokens = member.parked.tokens if member.parked else 0
        member.parked = None
        self.leases.tokens_parked -= tokens
        return tokens

    # -- trajectories --------------------------------------------------------------------------------------------------

    def _deliver(self, event: ev.TrajectoryDelivered) -> None:
        slot, group, member = self._end(event.lease)
        # It has the parked tokens in it; if not, they are lost.
        self.leases.tokens_lost += max(0, self._unpark(member) - event.tokens)
        self.leases.delivered += 1
        training = not is_heldout(slot.group)
        if training:
            self.tokens.generated += event.tokens
            self.trajectories.generated += 1
        if event.verdict == "retry":
            member.retries += 1
            self._grant_anew(slot, member)
            if training:
                _add(self.tokens.failed, event.outcome.value, event.tokens)
                _add(self.trajectories.failed, event.outcome.value, 1)
        elif training:
            member.delivery = Delivery(
                event.lease, event.tokens, event.versions, event.outcome, event.verdict, event.place
            )
            self.delivered[event.lease] = slot
            self._fly(member.delivery, 1)
            self.bytes_held += event.place.length
            if event.reward is not None and math.isfinite(event.reward):
                group.scored += 1
                group.reward += min(1.0, max(0.0, event.reward))
            self._complete(group)
        else:
            self._score(self.heldout[heldout_version(slot.group)], event)
            del self.groups[slot.group]

    def _score(self, tally: HeldoutTally, event: ev.TrajectoryDelivered) -> None:
        tally.ended += 1
        tally.tokens += event.tokens
        if event.reward is not None:
            tally.scored += 1
            tally.reward += event.reward
            tally.passed += event.reward >= 1

    def _close(self, event: ev.GroupClosed) -> None:
        group = self.groups[event.group]
        for lease in event.late:
            del self.running[lease]
        if event.late:
            _add(self.leases.returned, CLOSED, len(event.late))
        self.leases.tokens_lost += event.tokens
        for number, member in enumerate(group.members):
            if member.delivery is None:
                member.closed = True
                self.leases.tokens_lost += self._unpark(member)
                for slots in self._waiting():
                    if (slot := Slot(group.group, number)) in slots:
                        slots.remove(slot)
        self._complete(group)

    def _complete(self, group: Group) -> None:
        """Once its last member is here: to the learner, or out when no member may be trained on."""
        if not all(member.delivery or member.closed for member in group.members):
            return
        self.opened -= 1
        if group.rated and group.scored:
            self.tasks[group.task].rate_group(group.reward / group.scored)
        if any(delivery.verdict == "train" for delivery in group.deliveries()):
            group.phase = Phase.READY
            self.ready.append(group.group)
            self.accepted += 1
            return
        self.bytes_held -= held(group)
        for delivery in group.deliveries():
            self._fly(delivery, -1)
            self._count(
                delivery, Fate(lease=delivery.lease, outcome=delivery.outcome, failed=delivery.tokens), consumed=False
            )
        self._forget([group])

    # -- groups --------------------------------------------------------------------------------------------------------

    def _take(self, event: ev.GroupsTaken) -> None:
        for number in event.groups:
            group = self.groups[number]
            index = self.ready.index(number)
            del self.ready[index]
            self.again -= index < self.again
            self.with_learner[number] = None
            self.takes += 1
            group.phase, group.taken = Phase.TAKEN, self.takes
            self.bytes_held -= held(group)

    def _settle(self, event: ev.FatesSettled) -> None:
        fates = {fate.lease: fate for fate in event.fates}
        groups = {self.delivered[lease].group: None for lease in fates}
        for group in [self.groups[number] for number in groups]:
            del self.with_learner[group.group]
            for delivery in group.deliveries():
                self._fly(delivery, -1)
                delivery.fate = fates[delivery.lease]
                self._count(delivery, delivery.fate, consumed=event.version is not None)
            if event.version is None:
                self.accepted -= 1
                self._forget([group])
            else:
                group.phase, group.version = Phase.CONSUMED, event.version
                self.consumed += 1

    def _rewind(self, event: ev.LearnerJoined) -> None:
        lost = [g for g in self.groups.values() if g.phase == Phase.CONSUMED and g.version > event.version]
        for group in lost:
            self.consumed -= 1
            for delivery in group.deliveries():
                self._fly(delivery, 1)
                if delivery.fate is not None:
                    self._count(delivery, delivery.fate, consumed=True, sign=-1)
                delivery.fate = None
        lost.sort(key=lambda group: (group.version, group.taken))
        self._ready_again(lost + self.taken())
        self.accepted += event.unseen
        self.consumed += event.unseen
        self.version = event.version
        if self.weights is not None and self.weights.version != event.version:
            self.weights = None  # of steps that are made again
        self.draining = self.done = False
        self.hellos[event.name] = event.request

    def taken(self) -> list[Group]:
        """What the learner has, in the order it took them."""
        return [self.groups[number] for number in self.with_learner]

    def oldest_open(self) -> int:
        """The first of the groups that are being made, or the next one."""
        being_made = (g.group for g in self.groups.values() if g.phase == Phase.OPEN and not is_heldout(g.group))
        return min(being_made, default=self.next_group)

    def _ready_again(self, groups: list[Group]) -> None:
        for group in groups:
            group.phase, group.taken, group.version = Phase.READY, 0, 0
            self.with_learner.pop(group.group, None)
            self.bytes_held += held(group)
        self.again += len(groups)
        self.ready[:0] = [group.group for group in groups]

    def _forget(self, groups: list[Group]) -> None:
        for group in groups:
            for delivery in group.deliveries():
                del self.delivered[delivery.lease]
            del self.groups[group.group]

    # -- accounts ------------------------------------------------------------------------------------------------------

    def _count(self, delivery: Delivery, fate: Fate, *, consumed: bool, sign: int = 1) -> None:
        kind = next((name for name in FATES if getattr(fate, name)), "")
        if not kind:  # it had no sampled token
            kind = "failed" if delivery.verdict == "mask" else "trained" if consumed else "zero_signal"
        for name in FATES:
            tokens, one = sign * getattr(fate, name), sign * (name == kind)
            if name == "failed":
                _add(self.tokens.failed, delivery.outcome.value, tokens)
                _add(self.trajectories.failed, delivery.outcome.value, one)
            else:
                setattr(self.tokens, name, getattr(self.tokens, name) + tokens)
                setattr(self.trajectories, name, getattr(self.trajectories, name) + one)

    def _fly(self, delivery: Delivery, sign: int) -> None:
        """A trajectory is here and not settled, or is so no more: counted by itself, not as what is missing."""
        self.tokens.in_flight += sign * delivery.tokens
        self.trajectories.in_flight += sign

    def accounts(self) -> tuple[Accounts, Accounts]:
        """Tokens and trajectories."""
        return (
            msgspec.structs.replace(self.tokens, failed=dict(self.tokens.failed)),
            msgspec.structs.replace(self.trajectories, failed=dict(self.trajectories.failed)),
        )

    def lease_counts(self) -> LeaseCounts:
        return msgspec.structs.replace(self.leases, running=len(self.running), returned=dict(self.leases.returned))

    def heldout_results(self) -> list[HeldoutResult]:
        return [
            HeldoutResult(
                version=version,
                tasks=tally.tasks,
                ended=tally.ended,
                passed=tally.passed,
                mean_reward=tally.reward / tally.scored if tally.scored else 0.0,
                tokens=tally.tokens,
            )
            for version, tally in sorted(self.heldout.items())
        ]


def _add(counts: dict[str, int], name: str, amount: int) -> None:
    if total := counts.get(name, 0) + amount:
        counts[name] = total
    else:
        counts.pop(name, None)
