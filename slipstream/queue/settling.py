"""What a Settle must satisfy: the sums, whole groups, and nothing trained that may not be.

Invariant: fates that pass keep the accounting identity, and no token over the cutoff K passes as trained.
"""

from slipstream.queue.group import Delivery, Group, Phase
from slipstream.queue.messages import Fate
from slipstream.queue.state import FATES, LedgerState
from slipstream.staleness import Gate, over_cutoff


def refusal(state: LedgerState, groups: list[int], fates: list[Fate], version: int | None, gate: Gate) -> str | None:
    """None: book it. "": it was booked before and this is the same message again. Else why it is refused."""
    by_lease = {fate.lease: fate for fate in fates}
    if len(by_lease) != len(fates):
        return "a lease has more than one fate"
    if strange := [lease for lease in by_lease if lease >= state.next_lease or lease in state.running]:
        return f"lease {strange[0]} has no trajectory: it was not delivered"
    new = [lease for lease in by_lease if not _is_booked(state, by_lease[lease], version)]
    if not new:
        return ""
    if len(new) < len(by_lease):
        return (
            f"lease {next(lease for lease in by_lease if lease not in new)} is settled already, lease {new[0]} is not"
        )
    if version is not None and version <= state.final:
        return f"version {version} is final: consumption up to {state.final} is in a checkpoint"
    touched = {state.delivered[lease].group: None for lease in new}
    if set(touched) != set(groups):
        return f"the fates are those of groups {sorted(touched)}, and groups {sorted(groups)} are named"
    reasons = (_group_refusal(state.groups[number], by_lease, version, gate) for number in touched)
    return next((why for why in reasons if why), None)


def _is_booked(state: LedgerState, fate: Fate, version: int | None) -> bool:
    """Whether the lease's group is gone (refunded, or final), or consumed with this very fate."""
    slot = state.delivered.get(fate.lease)
    if slot is None:
        return True
    group = state.groups[slot.group]
    return group.phase == Phase.CONSUMED and group.version == version and fate in [d.fate for d in group.deliveries()]


def _group_refusal(group: Group, fates: dict[int, Fate], version: int | None, gate: Gate) -> str | None:
    if group.phase != Phase.TAKEN:
        return f"group {group.group} is {group.phase}, not taken"
    deliveries = list(group.deliveries())
    if missing := [delivery.lease for delivery in deliveries if delivery.lease not in fates]:
        return f"group {group.group} is settled as a whole: the fate of lease {missing[0]} is missing"
    reasons = (_fate_refusal(delivery, fates[delivery.lease], version, gate) for delivery in deliveries)
    return next((why for why in reasons if why), None)


def _fate_refusal(delivery: Delivery, fate: Fate, version: int | None, gate: Gate) -> str | None:
    counts = {name: int(getattr(fate, name)) for name in FATES}
    if sum(counts.values()) != delivery.tokens or min(counts.values()) < 0:
        shown = " + ".join(f"{count} {name}" for name, count in counts.items() if count) or "nothing"
        return f"lease {fate.lease}: {shown} is not its {delivery.tokens} sampled tokens"
    used = fate.trained + fate.masked_mismatch
    if version is None:
        return f"lease {fate.lease}: {used} tokens trained by no version" if used else None
    if used and delivery.verdict == "mask":
        return f"lease {fate.lease}: {used} tokens trained, but it ended as {delivery.outcome}, which is masked"
    fresh = delivery.tokens - over_cutoff(delivery.versions, version - 1, gate.cutoff)
    if fate.trained > fresh:
        return (
            f"lease {fate.lease}: {fate.trained} tokens trained, but only {fresh} are within staleness.cutoff = "
            f"{gate.cutoff} of the step that makes version {version}"
        )
    return None
