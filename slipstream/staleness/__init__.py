"""Pure arithmetic of how old tokens may be: the gate, versions, seeds. No I/O, no torch, no clocks."""

from slipstream.staleness.autopilot import Autopilot, Move, StepSeen
from slipstream.staleness.gate import Gate
from slipstream.staleness.seeds import sample_seed
from slipstream.staleness.versions import Staleness, expand, over_cutoff, sampled_tokens, staleness

__all__ = [
    "Autopilot",
    "Gate",
    "Move",
    "Staleness",
    "StepSeen",
    "expand",
    "over_cutoff",
    "sample_seed",
    "sampled_tokens",
    "staleness",
]
