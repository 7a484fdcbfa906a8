"""What a finished trajectory shows to the rewards that score it."""

from typing import Any

import msgspec

from slipstream.task import Task
from slipstream.trajectory import Trajectory


class Evidence(msgspec.Struct, kw_only=True):
    """What a reward may ask for, by parameter name."""

    answer: str  # text of the last assistant turn
    task: Task
    messages: list[dict[str, Any]]
    trajectory: Trajectory
