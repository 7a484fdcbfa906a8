"""How a trajectory, or a branch of one, is ended from anywhere in it."""

from slipstream.trajectory import Outcome


class Ended(Exception):
    """Raised anywhere in a trajectory to end it with this outcome."""

    def __init__(self, outcome: Outcome, why: str = "") -> None:
        super().__init__(why)
        self.outcome, self.why = outcome, why


class ContextFull(Ended):
    """The engine's length leaves this conversation no room. Who catches it may go on in another branch."""

    def __init__(self, why: str) -> None:
        super().__init__(Outcome.TRUNCATED_TOKENS, why)
