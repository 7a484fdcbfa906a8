"""What the policy in `[outcomes]` comes to for one trajectory.

Invariant: one that was not scored is never trained on, whatever its outcome: a failure is not a zero.
"""

import math
from typing import Literal

from slipstream.config import OutcomesSection
from slipstream.queue.row import Row

Verdict = Literal["train", "mask", "retry"]


def verdict(row: Row, retries: int, outcomes: OutcomesSection) -> Verdict:
    """`retries`: how many its member has had."""
    policy: Verdict = getattr(outcomes, row.outcome)
    if policy == "train" and (row.reward is None or not math.isfinite(row.reward)):
        return "mask"
    if policy != "retry":
        return policy
    return "retry" if retries < outcomes.retries else "mask"
