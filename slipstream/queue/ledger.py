"""The ledger: who may produce what, what was delivered, and what became of it. A pure state machine.

Invariants:
- a lease ends exactly once: delivered, or returned; what arrives for a lease that ended is a duplicate;
- accepted + running groups never exceed the gate's limit by an opening;
- a group is handed to the learner once all its members ended, is held by it once, and is settled once per timeline;
- generated = trained + masked + zero_signal + discarded + failed + in flight, in trajectories and in tokens.

Decisions (`grant`, `deliver`, ...) return events after applying them; the caller journals them. Times are handed in.
"""

import random
from collections import deque
from collections.abc import Callable

import msgspec

from slipstream.config import OutcomesSection
from slipstream.queue import events
from slipstream.queue.messages import Accounts, Fate, HeldoutResult, LeaseCounts
from slipstream.staleness import Gate
from slipstream.trajectory import Outcome


class Member(msgspec.Struct):
    """One of a group's trajectories: waiting for a lease, leased, or ended with the lease that delivered it."""

    attempt: int = 0
    ended: "Ended | None" = None


class Ended(msgspec.Struct, frozen=True):
    lease: int
    tokens: int
    outcome: Outcome
    trains: bool  # by the outcome policy
    where: events.Locator | None


class Group(msgspec.Struct):
    group: int
    task: int
    members: list[Member]
    heldout: int | None

    def complete(self) -> bool:
        return all(member.ended is not None for member in self.members)

    def ended(self) -> list[Ended]:
        return [member.ended for member in self.members if member.ended is not None]


class Running(msgspec.Struct, frozen=True):
    lease: int
    group: int
    member: int
    owner: str
    at: float
    deadline: float


class Refusal(Exception):
    """A request that contradicts the ledger; says how."""


class Ledger:
    def __init__(
        self,
        *,
        gate: Gate,
        group_size: int,
        tasks: int,
        outcomes: OutcomesSection,
        seed: int,
        lease_seconds: float,
        byte_budget: int,
    ) -> None:
        self.gate, self._group_size, self._tasks = gate, group_size, tasks
        self._outcomes, self._seed = outcomes, seed
        self._lease_seconds, self._byte_budget = lease_seconds, byte_budget
        self.version = 0
        self.groups: dict[int, Group] = {}
        self.running: dict[int, Running] = {}
        self.ready: deque[int] = deque()
        self.taken: list[int] = []
        self.consumed: dict[int, list[int]] = {}  # version -> groups, since the last checkpoint
        self._fates: dict[int, list[Fate]] = {}  # group -> fates, of consumed ones
        self._pending: deque[tuple[int, int]] = deque()  # (group, member) that wait for a lease
        self._pending_heldout: deque[tuple[int, int]] = deque()
        self._accepted = 0
        self._open = 0  # training groups with members that have not ended
        self._opened = 0  # training groups ever, which is where the task order stands
        self._order: tuple[int, list[int]] = (-1, [])  # the epoch, and its tasks shuffled
        self._next_group = 0
        self._next_lease = 0
        self.tokens, self.trajectories, self.leases = Accounts(), Accounts(), LeaseCounts()
        self.heldout: dict[int, HeldoutResult] = {}
        self.draining = self.done = False
        self._appliers: dict[type, Callable[..., None]] = {
            events.Opened: self._on_opened,
            events.Granted: self._on_granted,
            events.Delivered: self._on_delivered,
            events.Duplicate: self._on_duplicate,
            events.Returned: self._on_returned,
            events.Taken: self._on_taken,
            events.Untaken: self._on_untaken,
            events.Settled: self._on_settled,
            events.Published: self._on_published,
            events.Checkpointed: self._on_checkpointed,
            events.Rewound: self._on_rewound,
            events.Evaluated: self._on_evaluated,
            events.Drained: self._on_drained,
        }

    def apply(self, event: events.LedgerEvent) -> None:
        self._appliers[type(event)](event)

    # -- decisions -----------------------------------------------------------------------------------------------------

    def grant(self, owner: str, room: int, now: float, bytes_held: int) -> tuple[list[events.LedgerEvent], str]:
        """Lease up to `room` trajectories to `owner`: held-out ones first, then members of open groups, then new
        groups as the gate lets in. The reason is '' unless nothing was granted."""
        out: list[events.LedgerEvent] = []
        why = ""
        granted = 0
        while granted < room and not why:
            waiting = self._pending_heldout or self._pending
            if not waiting:
                why = self._why_closed(bytes_held)
                if not why:
                    self._decide(self._opening(), out)
                continue
            group, member = waiting[0]
            lease = events.Granted(
                lease=self._next_lease,
                group=group,
                member=member,
                attempt=self.groups[group].members[member].attempt,
                owner=owner,
                at=now,
                deadline=now + self._lease_seconds,
            )
            self._decide(lease, out)
            granted += 1
        return out, "" if granted else why

    def why(self, bytes_held: int) -> str:
        """Why no lease would be granted now; '' if one would."""
        return "" if self._pending_heldout or self._pending else self._why_closed(bytes_held)

    def _why_closed(self, bytes_held: int) -> str:
        if self.draining:
            return "the run drains: no new groups"
        if bytes_held >= self._byte_budget:
            return (
                f"{bytes_held >> 20} MB of trajectories wait for the learner; raise queue.memory_mb "
                f"({self._byte_budget >> 20}) or speed up the learner"
            )
        if self.gate.capacity(self.version, self._accepted, self._open) < 1:
            return (
                f"depth {self.gate.depth:g} is full: {self._accepted} groups accepted and {self._open} running at "
                f"version {self.version}; the learner is the slower side, or raise staleness.depth"
            )
        return ""

    def _opening(self) -> events.Opened:
        epoch, place = divmod(self._opened, self._tasks)
        if self._order[0] != epoch:
            order = list(range(self._tasks))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return events.Opened(group=self._next_group, task=self._order[1][place], members=self._group_size)

    def deliver(
        self, lease: int, tokens: int, outcome: Outcome, reward: float | None, where: events.Locator | None
    ) -> list[events.LedgerEvent]:
        """A trajectory arrived; a duplicate if its lease ended before. Raises Refusal for a lease never granted."""
        out: list[events.LedgerEvent] = []
        if lease >= self._next_lease:
            raise Refusal(f"lease {lease} was never granted")
        if lease in self.running:
            self._decide(events.Delivered(lease=lease, tokens=tokens, outcome=outcome, reward=reward, where=where), out)
        else:
            self._decide(events.Duplicate(lease=lease), out)
        return out

    def give_back(self, leases: list[int], reason: str, tokens: dict[int, int]) -> list[events.LedgerEvent]:
        """Leases end without a trajectory; `tokens` is what was sampled under them, as far as known."""
        out: list[events.LedgerEvent] = []
        for lease in leases:
            if lease in self.running:
                self._decide(events.Returned(lease=lease, reason=reason, tokens=tokens.get(lease, 0)), out)
        return out

    def take(self, room: int, held: list[int]) -> list[events.LedgerEvent]:
        """Hand complete groups to the learner, first those it took before and does not hold."""
        out: list[events.LedgerEvent] = []
        holds = set(held)
        lost = [group for group in self.taken if group not in holds]
        if lost:
            self._decide(events.Untaken(groups=lost), out)
        chosen = list(self.ready)[:room]
        if chosen:
            self._decide(events.Taken(groups=chosen), out)
        return out

    def settle(self, groups: list[int], fates: list[Fate], version: int | None) -> list[events.LedgerEvent]:
        """Raises Refusal if a fate does not name all of its tokens. Groups settled before are passed over."""
        out: list[events.LedgerEvent] = []
        taken = set(self.taken)
        mine = [group for group in groups if group in taken]
        by_lease = {fate.lease: fate for fate in fates}
        kept: list[Fate] = []
        for group in mine:
            for ended in self.groups[group].ended():
                fate = by_lease.get(ended.lease)
                if fate is None:
                    raise Refusal(f"group {group}: trajectory of lease {ended.lease} has no fate")
                if (total := total_of(fate)) != ended.tokens:
                    raise Refusal(f"lease {ended.lease}: its fate names {total} tokens, it has {ended.tokens}")
                kept.append(fate)
        if mine:
            self._decide(events.Settled(groups=mine, fates=kept, version=version), out)
        return out

    def publish(self, version: int) -> list[events.LedgerEvent]:
        out: list[events.LedgerEvent] = []
        if version != self.version:
            self._decide(events.Published(version=version), out)
        return out

    def checkpoint(self, version: int) -> list[events.LedgerEvent]:
        out: list[events.LedgerEvent] = []
        self._decide(events.Checkpointed(version=version), out)
        return out

    def rewind(self, version: int) -> list[events.LedgerEvent]:
        """A learner arrives holding nothing, at `version`."""
        out: list[events.LedgerEvent] = []
        if self.taken:
            self._decide(events.Untaken(groups=list(self.taken)), out)
        if version < self.version or any(later > version for later in self.consumed):
            self._decide(events.Rewound(version=version), out)
        return out

    def evaluate(self, version: int, tasks: int) -> list[events.LedgerEvent]:
        out: list[events.LedgerEvent] = []
        if version in self.heldout:
            return out
        self._decide(events.Evaluated(version=version, tasks=tasks), out)
        for task in range(tasks):
            self._decide(events.Opened(group=self._next_group, task=task, members=1, heldout=version), out)
        return out

    def drain(self, done: bool) -> list[events.LedgerEvent]:
        out: list[events.LedgerEvent] = []
        self._decide(events.Drained(done=done), out)
        return out

    def expired(self, now: float) -> list[int]:
        return [lease for lease, running in self.running.items() if running.deadline <= now]

    def owned(self, owner: str) -> list[Running]:
        return [running for running in self.running.values() if running.owner == owner]

    def min_version(self, group: int) -> int:
        """The oldest weights a trajectory of this group may start on now."""
        heldout = self.groups[group].heldout
        return self.gate.min_version(self.version) if heldout is None else heldout

    def _decide(self, event: events.LedgerEvent, out: list[events.LedgerEvent]) -> None:
        self.apply(event)
        out.append(event)

    # -- what events do ------------------------------------------------------------------------------------------------

    def _on_opened(self, event: events.Opened) -> None:
        members = [Member() for _ in range(event.members)]
        self.groups[event.group] = Group(event.group, event.task, members, event.heldout)
        self._next_group = event.group + 1
        places = [(event.group, member) for member in range(event.members)]
        if event.heldout is None:
            self._opened += 1
            self._open += 1
            self._pending.extend(places)
        else:
            self._pending_heldout.extend(places)

    def _on_granted(self, event: events.Granted) -> None:
        waiting = self._waiting(event.group)
        waiting.remove((event.group, event.member))
        self.running[event.lease] = Running(
            event.lease, event.group, event.member, event.owner, event.at, event.deadline
        )
        self._next_lease = event.lease + 1
        self.leases.granted += 1
        self.leases.running += 1

    def _on_delivered(self, event: events.Delivered) -> None:
        running = self._end(event.lease)
        self.leases.delivered += 1
        group = self.groups[running.group]
        member = group.members[running.member]
        policy = getattr(self._outcomes, event.outcome.value)
        retry = policy == "retry" and member.attempt < self._outcomes.retries
        trains = policy == "train" and event.reward is not None
        ended = Ended(event.lease, event.tokens, event.outcome, trains, event.where)
        if group.heldout is None:
            self.tokens.generated += event.tokens
            self.trajectories.generated += 1
        if retry:
            if group.heldout is None:
                self._fail(ended)
            self._again(running)
            return
        member.ended = ended
        if group.heldout is not None:
            self._count_heldout(group, event)
            return
        self.tokens.in_flight += event.tokens
        self.trajectories.in_flight += 1
        if group.complete():
            self._open -= 1
            self._complete(group)

    def _complete(self, group: Group) -> None:
        if any(ended.trains for ended in group.ended()):
            self._accepted += 1
            self.ready.append(group.group)
            return
        # Nobody in it can be trained on: it never reaches the learner, and its place is free again.
        for ended in group.ended():
            self.tokens.in_flight -= ended.tokens
            self.trajectories.in_flight -= 1
            self._fail(ended)
        del self.groups[group.group]

    def _count_heldout(self, group: Group, event: events.Delivered) -> None:
        result = self.heldout[group.heldout or 0]
        reward = event.reward or 0.0
        result.mean_reward = (result.mean_reward * result.ended + reward) / (result.ended + 1)
        result.ended += 1
        result.passed += reward >= 1
        result.tokens += event.tokens
        del self.groups[group.group]

    def _on_duplicate(self, event: events.Duplicate) -> None:
        self.leases.duplicates += 1

    def _on_returned(self, event: events.Returned) -> None:
        running = self._end(event.lease)
        self.leases.returned[event.reason] = self.leases.returned.get(event.reason, 0) + 1
        self.leases.tokens_lost += event.tokens
        self._again(running)

    def _on_taken(self, event: events.Taken) -> None:
        for group in event.groups:
            self.ready.remove(group)
            self.taken.append(group)

    def _on_untaken(self, event: events.Untaken) -> None:
        for group in event.groups:
            self.taken.remove(group)
        self.ready.extendleft(reversed(event.groups))

    def _on_settled(self, event: events.Settled) -> None:
        for fate in event.fates:
            self._book(fate, +1)
        for group in event.groups:
            self.taken.remove(group)
        if event.version is None:
            self._accepted -= len(event.groups)
            for group in event.groups:
                del self.groups[group]
            return
        self.consumed.setdefault(event.version, []).extend(event.groups)
        leases = {ended.lease: group for group in event.groups for ended in self.groups[group].ended()}
        for fate in event.fates:
            self._fates.setdefault(leases[fate.lease], []).append(fate)

    def _on_published(self, event: events.Published) -> None:
        self.version = event.version

    def _on_checkpointed(self, event: events.Checkpointed) -> None:
        for version in [version for version in self.consumed if version <= event.version]:
            for group in self.consumed.pop(version):
                del self.groups[group]
                del self._fates[group]

    def _on_rewound(self, event: events.Rewound) -> None:
        later = sorted(version for version in self.consumed if version > event.version)
        again = [group for version in later for group in self.consumed.pop(version)]
        for group in again:
            for fate in self._fates.pop(group):
                self._book(fate, -1)
        self.ready.extendleft(reversed(again))
        self.version = event.version

    def _on_evaluated(self, event: events.Evaluated) -> None:
        self.heldout[event.version] = HeldoutResult(
            version=event.version, tasks=event.tasks, ended=0, passed=0, mean_reward=0.0, tokens=0
        )

    def _on_drained(self, event: events.Drained) -> None:
        self.draining = True
        self.done = self.done or event.done

    def _waiting(self, group: int) -> deque[tuple[int, int]]:
        return self._pending if self.groups[group].heldout is None else self._pending_heldout

    def _end(self, lease: int) -> Running:
        self.leases.running -= 1
        return self.running.pop(lease)

    def _again(self, running: Running) -> None:
        """The member waits for another lease, ahead of those that never had one."""
        self.groups[running.group].members[running.member].attempt += 1
        self._waiting(running.group).appendleft((running.group, running.member))

    def _fail(self, ended: Ended) -> None:
        name = ended.outcome.value
        self.tokens.failed[name] = self.tokens.failed.get(name, 0) + ended.tokens
        self.trajectories.failed[name] = self.trajectories.failed.get(name, 0) + 1

    def _book(self, fate: Fate, sign: int) -> None:
        """Move a trajectory and its tokens from in flight to where they went, or back (sign -1)."""
        outcome = fate.outcome
        for name in BUCKETS:
            count = getattr(fate, name)
            setattr(self.tokens, name, getattr(self.tokens, name) + sign * count)
        if fate.failed:
            self.tokens.failed[outcome] = self.tokens.failed.get(outcome, 0) + sign * fate.failed
        self.tokens.in_flight -= sign * total_of(fate)
        kind = kind_of(fate)
        if kind == "failed":
            self.trajectories.failed[outcome] = self.trajectories.failed.get(outcome, 0) + sign
        else:
            setattr(self.trajectories, kind, getattr(self.trajectories, kind) + sign)
        self.trajectories.in_flight -= sign


BUCKETS = ("trained", "masked_stale", "masked_mismatch", "zero_signal", "discarded_stale")


def total_of(fate: Fate) -> int:
    return sum(getattr(fate, name) for name in BUCKETS) + fate.failed


def kind_of(fate: Fate) -> str:
    """Where a trajectory counts as a whole: the first of these that has a token; failed for one without tokens."""
    order = ("failed", "zero_signal", "discarded_stale", "trained", "masked_stale", "masked_mismatch")
    return next((name for name in order if getattr(fate, name)), "failed")
