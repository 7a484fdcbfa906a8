"""Who may generate what, what became of it, and when it is final: the queue's decisions, without sockets or disk.

Invariant: every change of `state` is an event in `events` first, so the journal can repeat it; a lease ends exactly
once; a trajectory is consumed once or discarded with a reason; no token over the cutoff is ever booked as trained.
Times are handed in, in seconds of any one clock.
"""

import logging
from collections.abc import Iterable
from itertools import chain, islice

from slipstream.config import Config
from slipstream.observe.clock import ClockReading
from slipstream.queue import events as ev
from slipstream.queue.capacity import Capacity
from slipstream.queue.depth import Depth
from slipstream.queue.group import Group, Parked, Phase, Slot
from slipstream.queue.messages import (
    Fate,
    Granted,
    Lease,
    Ok,
    Refused,
    RollouterBeat,
    Status,
    StepPace,
    TakenGroup,
    Weights,
    Welcome,
)
from slipstream.queue.row import Row
from slipstream.queue.sampler import rated, sampler
from slipstream.queue.selection import selection
from slipstream.queue.settling import refusal
from slipstream.queue.state import LedgerState
from slipstream.queue.tasks import TaskOrder, heldout_group, heldout_version, is_heldout
from slipstream.queue.verdict import verdict
from slipstream.staleness import sample_seed

log = logging.getLogger(__name__)

SILENCE_SECONDS = 15.0  # an owner that says nothing for so long is gone
UNKNOWN_SECONDS = 10.0  # a lease granted so long ago that its owner's beat does not list never reached it


class Ledger:
    """Feed `state.apply` the journal's events first, then `resume`."""

    def __init__(self, config: Config, order: TaskOrder, state: LedgerState | None = None) -> None:
        self.state = state or LedgerState()
        self.events: list[ev.AnyEvent] = []  # not yet in the journal; the owner of the ledger empties it
        self._config, self._order = config, order
        self._depth = Depth(config, self.state.depth)
        self._sampler = sampler(config.tasks.sampler, order, config.run.seed)
        for task, record in self.state.tasks.items():
            self._sampler.saw(task, record)
        self._capacity = Capacity(config, self._depth, self._sampler, self.state)
        self._select = selection(config.queue.selection, self._depth.gate.limit(version=0), order).select
        self._granted_at: dict[int, float] = {}
        self._began: dict[int, float] = {}  # open groups: when their first lease was granted
        self._seen: dict[str, float] = {}
        self._beats: dict[str, RollouterBeat] = {}
        self._learner: ClockReading | None = None
        self._learner_seen = 0.0
        if self.state.begun is None:
            self._do(ev.RunBegun(config.run.name, config.run.seed, order.digest()))

    def resume(self, now: float) -> None:
        """After a replay: leases that run have their whole time again, and their owners time to say so."""
        for lease, running in self.state.running.items():
            self._granted_at[lease] = self._seen[running.owner] = now
            self._began[running.slot.group] = now

    def _do(self, event: ev.AnyEvent) -> None:
        task = rated(event, self.state) if self._sampler.rates else None
        self.state.apply(event)
        self.events.append(event)
        if task in self.state.tasks:
            self._sampler.saw(task, self.state.tasks[task])

    # -- processes -----------------------------------------------------------------------------------------------------

    def hello(self, role: str, name: str, request: int, version: int, now: float) -> Welcome | Refused:
        """A new process. The same Hello sent again (`request`) changes nothing."""
        state = self.state
        if role == "learner" and version < state.final:
            return Refused(
                why=f"the learner starts at version {version}, but consumption up to {state.final} is final and not "
                f"handed out again; give it the checkpoint of version {state.final}, or use a new run directory"
            )
        if state.hellos.get(name) != request:
            if role == "learner":
                unseen = max(0, version * self._config.learner.batch - self._consumed_up_to(version))
                self._do(ev.LearnerJoined(name, request, version, unseen))
            elif role == "rollouter":
                self._do(ev.RollouterJoined(name, request))
                for lease in self._leases_of(name):
                    self._return(lease, "owner started anew")
                self._seen[name] = now
        return Welcome(
            run=self._config.run.name, seed=self._config.run.seed, version=state.version, weights=state.weights
        )

    def _consumed_up_to(self, version: int) -> int:
        later = (g for g in self.state.groups.values() if g.phase == Phase.CONSUMED and g.version > version)
        return self.state.consumed - sum(1 for _ in later)

    def beat(self, beat: RollouterBeat, now: float) -> None:
        self._seen[beat.name], self._beats[beat.name] = now, beat
        known = set(beat.leases)
        for lease in self._leases_of(beat.name):
            if lease not in known and now - self._granted_at[lease] > UNKNOWN_SECONDS:
                self._return(lease, "grant never arrived")

    def learner_beat(self, clock: ClockReading, now: float) -> None:
        self._learner, self._learner_seen = clock, now

    def expire(self, now: float) -> None:
        """Return the leases whose time is over or whose owner has gone silent."""
        silent = {name for name, seen in self._seen.items() if now - seen > SILENCE_SECONDS}
        for lease, running in list(self.state.running.items()):
            if running.owner in silent:
                self._return(lease, "owner gone")
            elif now - self._granted_at[lease] > self._config.queue.lease_seconds:
                self._return(lease, "deadline passed")
        for name in silent:
            del self._seen[name]
            self._beats.pop(name, None)
        self._close_overdue(now)
        self._capacity.say_when_full()
        if now - self._learner_seen > SILENCE_SECONDS:
            self._learner = None

    def _close_overdue(self, now: float) -> None:
        """Groups whose time is over go on with the members that ended, if these are enough."""
        enough, seconds = self._config.rollout.group_min, self._config.queue.lease_seconds
        for number, began in list(self._began.items()):
            group = self.state.groups.get(number)
            if group is None or group.phase != Phase.OPEN:
                del self._began[number]
            elif enough and now - began > seconds and sum(1 for _ in group.deliveries()) >= enough:
                self._close(group)

    def _close(self, group: Group) -> None:
        late = {lease: run.owner for lease, run in self.state.running.items() if run.slot.group == group.group}
        ended = sum(1 for _ in group.deliveries())
        log.warning(
            "group %d (task %s) goes on with %d of its %d members: queue.lease_seconds are over; %d leases end",
            group.group,
            group.task,
            ended,
            len(group.members),
            len(late),
        )
        tokens = sum(self._tokens_in_flight(owner, lease) for lease, owner in late.items())
        self._do(ev.GroupClosed(group.group, list(late), tokens))
        for lease in late:
            del self._granted_at[lease]

    # -- leases --------------------------------------------------------------------------------------------------------

    def ask(self, owner: str, room: int, request: int, now: float) -> Granted:
        """Up to `room` leases. The same Ask sent again gets the same ones."""
        self._seen[owner] = now
        last = self.state.last_grants.get(owner)
        if last is None or last.request != request:
            slots = self._slots(room)
            if not slots:
                return Granted(leases=[], why=self.why(), done=self.state.done)
            last = ev.LeasesGranted(request, owner, [self._grant(slot, i) for i, slot in enumerate(slots)])
            self._do(last)
            self._granted_at |= dict.fromkeys((grant.lease for grant in last.grants), now)
            for grant in last.grants:
                if not is_heldout(grant.group):
                    self._began.setdefault(grant.group, now)
        return Granted(leases=[self._lease(grant) for grant in last.grants if grant.lease in self.state.running])

    def _slots(self, room: int) -> list[Slot]:
        """Held-out first, then what is granted anew, then members of open groups; only then a group is opened."""
        state = self.state
        if state.done:
            return []
        if state.draining:
            return state.heldout_slots[:room]
        while True:
            slots = list(islice(chain(state.heldout_slots, state.retried_slots, state.new_slots), max(0, room)))
            if len(slots) >= room:
                return slots
            if self._capacity.closed():
                self._depth.refused |= self._capacity.at_depth()
                return slots
            task = self._sampler.next(state.next_group)
            assert task is not None  # or it were closed
            size, rated = self._config.rollout.group, self._sampler.rates
            self._do(ev.GroupOpened(state.next_group, task.id, size, rated))

    def _grant(self, slot: Slot, index: int) -> ev.Grant:
        member = self.state.groups[slot.group].members[slot.member]
        return ev.Grant(self.state.next_lease + index, slot.group, slot.member, member.attempt)

    def _lease(self, grant: ev.Grant) -> Lease:
        heldout = is_heldout(grant.group)
        return Lease(
            lease=grant.lease,
            group=grant.group,
            member=grant.member,
            attempt=grant.attempt,
            task=self._order.named(grant.group, self.state.groups[grant.group].task),
            seed=sample_seed(self._config.run.seed, grant.group, grant.member, grant.attempt),
            min_version=heldout_version(grant.group) if heldout else self._depth.gate.min_version(self.state.version),
            deadline_s=self._config.queue.lease_seconds,
            heldout=heldout,
            parked=self.state.member(grant.lease).parked is not None,
        )

    def why(self) -> str:
        """Why nothing is granted now; "" when leases flow."""
        state = self.state
        if state.done:
            return "the run is over"
        if state.heldout_slots:
            return ""
        if state.draining:
            return "draining: leases that run may finish, no new ones"
        return "" if state.retried_slots or state.new_slots else self._capacity.closed()

    def give_back(self, owner: str, leases: Iterable[int], reason: str) -> None:
        for lease in set(leases) & set(self._leases_of(owner)):
            self._return(lease, reason)

    def _leases_of(self, owner: str) -> list[int]:
        return [lease for lease, running in self.state.running.items() if running.owner == owner]

    def _return(self, lease: int, reason: str) -> None:
        running = self.state.running[lease]
        task = self.state.groups[running.slot.group].task
        log.warning(
            "lease %d (task %s, attempt %d) of %s returned: %s", lease, task, running.attempt, running.owner, reason
        )
        self._do(ev.LeaseReturned(lease, reason, self._tokens_in_flight(running.owner, lease)))
        del self._granted_at[lease]

    def _tokens_in_flight(self, owner: str, lease: int) -> int:
        """That are not parked."""
        beat, parked = self._beats.get(owner), self.state.member(lease).parked
        sampled = dict(zip(beat.leases, beat.tokens_in_flight, strict=False)).get(lease, 0) if beat else 0
        return max(0, sampled - parked.tokens) if parked else sampled

    # -- parking -------------------------------------------------------------------------------------------------------

    def park(self, row: Row, place: ev.Place) -> None:
        """How far a trajectory has come that `expects` let in. An older word than the last one changes nothing."""
        parked = self.state.member(row.lease).parked
        if parked is None or parked.tokens < row.tokens:
            self._do(ev.TrajectoryParked(row.lease, row.tokens, place))

    def parked(self, owner: str, lease: int) -> Parked | None:
        """Where a lease that this owner has goes on; None: at the beginning."""
        running = self.state.running.get(lease)
        return self.state.member(lease).parked if running and running.owner == owner else None

    def drop_parked(self, owner: str, lease: int) -> None:
        if self.parked(owner, lease) is not None:
            log.warning("lease %d begins anew: %s cannot go on from what was parked", lease, owner)
            self._do(ev.ParkedDropped(lease))

    # -- trajectories --------------------------------------------------------------------------------------------------

    def expects(self, row: Row) -> bool:
        """False: its lease has ended already (a duplicate, or late and granted anew), or was never granted."""
        running = self.state.running.get(row.lease)
        if running is None:
            return False
        group = self.state.groups[running.slot.group]
        return (group.group, group.task, running.attempt) == (row.group, row.task, row.attempt)

    def place(self, lease: int) -> ev.Place:
        """Where the journal has the trajectory of a group that lives."""
        slot = self.state.delivered[lease]
        delivery = self.state.groups[slot.group].members[slot.member].delivery
        assert delivery is not None
        return delivery.place

    def duplicate(self, row: Row) -> None:
        log.warning("lease %d (task %s) was delivered after it had ended: dropped", row.lease, row.task)
        self._do(ev.DuplicateArrived(row.lease))

    def deliver(self, row: Row, place: ev.Place) -> None:
        """A trajectory that `expects` let in and that lies in the journal at `place`."""
        del self._granted_at[row.lease]
        decided = verdict(row, self.state.member(row.lease).retries, self._config.outcomes)
        if decided != "train":
            log.warning("lease %d (task %s) ended as %s: %s", row.lease, row.task, row.outcome, decided)
        self._do(ev.TrajectoryDelivered(row.lease, row.tokens, row.versions, row.outcome, row.reward, decided, place))
        if not is_heldout(row.group) and decided == "mask" and row.group not in self.state.groups:
            log.warning(
                "group %d (task %s) is dropped: none of its trajectories may be trained on", row.group, row.task
            )

    def take(self, room: int, held: Iterable[int]) -> list[TakenGroup]:
        """Complete groups in the policy's order; before them those that were taken and that the learner does not hold,
        since the answer that brought them was lost."""
        holds = set(held)
        if lost := [group.group for group in self.state.taken() if group.group not in holds]:
            self._do(ev.GroupsUntaken(lost))
        again, rest = self.state.ready[: self.state.again], self.state.ready[self.state.again :]
        numbers = again[: max(0, room)]
        if room > len(again):
            numbers += self._select(self.state, rest, room - len(again))
        if numbers:
            self._do(ev.GroupsTaken(numbers))
        return [
            TakenGroup(
                group=group.group, leases=[d.lease for d in group.deliveries()], frames=[1 for _ in group.deliveries()]
            )
            for group in (self.state.groups[number] for number in numbers)
        ]

    def exhausted(self) -> bool:
        """Whether nothing will ever be ready again: the run is over, or no group is being made and none will be."""
        state = self.state
        if state.done or state.ready:
            return state.done
        if state.draining:
            return not any(not is_heldout(running.slot.group) for running in state.running.values())
        return state.opened == 0 and self._capacity.tasks_are_out()

    def waiting_for(self) -> str:
        """What a Take without groups waits for."""
        state = self.state
        if self.exhausted():
            return "the run is over" if state.done else "no more groups will come"
        running = sum(1 for running in state.running.values() if not is_heldout(running.slot.group))
        closed = self.why()
        if state.ready:
            first = state.groups[state.oldest_open()]
            return (
                f"queue.selection = {self._config.queue.selection} holds {len(state.ready)} complete groups back until "
                f"group {first.group} (task {first.task}) is complete"
            )
        return (
            f"no complete group: {state.opened} being made, {running} trajectories running"
            + (f"; {closed}" if closed else "")
            + ("" if self._beats else "; no rollouter is here")
        )

    def settle(self, groups: list[int], fates: list[Fate], version: int | None) -> Ok | Refused:
        """Book what became of whole groups that were taken. The same Settle sent again changes nothing."""
        why = refusal(self.state, groups, fates, version, self._depth.gate)
        if why is None:
            self._do(ev.FatesSettled(fates, version))
        return Refused(why=why) if why else Ok()

    # -- versions ------------------------------------------------------------------------------------------------------

    def publish(self, weights: Weights, step: StepPace | None = None) -> None:
        """`step`: how the step went that made them; None when there was none, or it says nothing."""
        if weights == self.state.weights:
            return
        first = weights.version > self.state.highest
        self._do(ev.WeightsPublished(weights))
        if first and step is not None and (moved := self._depth.after(step)):
            self._do(moved)

    def checkpointed(self, version: int) -> None:
        if version > self.state.final:
            self._do(ev.ConsumptionFinal(version))

    def evaluate(self, version: int) -> None:
        """Once a version, however often it is asked for."""
        if version not in self.state.heldout:
            ids = [task.id for task in self._order.heldout]
            self._do(ev.EvaluationOpened(version, heldout_group(version, 0), ids))

    def drain(self, done: bool) -> None:
        if not self.state.draining or done > self.state.done:
            self._do(ev.Drained(done))

    def status(self, refused: int = 0) -> Status:
        tokens, trajectories = self.state.accounts()
        return Status(
            version=self.state.version,
            tokens=tokens,
            trajectories=trajectories,
            leases=self.state.lease_counts(),
            groups_ready=len(self.state.ready),
            bytes_held=self.state.bytes_held,
            bytes_most=self._capacity.memory,
            rollouters=list(self._beats.values()),
            heldout=self.state.heldout_results(),
            why=self.why(),
            refused=refused,
            learner=self._learner,
            depth=self._depth.gate.depth,
        )
