"""`slipstream run`: everything of a run on this machine, started, watched and ended by one supervisor."""

from slipstream.launch.supervisor import run

__all__ = ["run"]
