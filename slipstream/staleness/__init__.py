"""Pure arithmetic of how old tokens may be: the gate, versions, seeds. No I/O, no torch, no clocks."""

from slipstream.staleness.gate import Gate

__all__ = ["Gate"]
