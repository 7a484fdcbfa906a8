"""How a trajectory is ended from anywhere in it."""

from slipstream.trajectory import Outcome


class Ended(Exception):
    """Raised anywhere in a trajectory to end it with this outcome."""

    def __init__(self, outcome: Outcome, why: str = "") -> None:
        super().__init__(why)
        self.outcome, self.why = outcome, why
