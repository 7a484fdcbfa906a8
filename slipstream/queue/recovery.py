"""The ledger of a run that is begun, or gone on with.

Invariant: it knows all that the journal's events say, and nothing else.
"""

import time

from slipstream.config import Config
from slipstream.errors import UserError
from slipstream.queue import events as ev
from slipstream.queue.ledger import Ledger
from slipstream.queue.state import LedgerState
from slipstream.queue.tasks import TaskOrder


def replayed(config: Config, order: TaskOrder, recovered: list[ev.AnyEvent]) -> Ledger:
    """Raises UserError when the events are those of other tasks."""
    state = LedgerState()
    for event in recovered:
        state.apply(event)
    if state.begun is not None and state.begun.tasks != order.digest():
        raise UserError("tasks.train, tasks.heldout or run.seed differ from those this run began with; use a new --dir")
    ledger = Ledger(config, order, state)
    ledger.resume(time.monotonic())
    return ledger
