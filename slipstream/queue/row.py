"""What the ledger needs to know of a delivered trajectory; the wire reads it from the record batch.

Invariant: plain values, so that the ledger works without Arrow.
"""

import msgspec

from slipstream.trajectory import Outcome, VersionRun


class Row(msgspec.Struct, frozen=True):
    lease: int
    group: int
    task: str
    attempt: int
    tokens: int  # sampled
    versions: list[VersionRun]  # how many sampled tokens each version has
    outcome: Outcome
    reward: float | None
