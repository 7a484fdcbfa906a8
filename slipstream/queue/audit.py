"""The accounts of a run, from its journal alone.

Invariant: `generated` is counted in the trajectories themselves and not taken from the ledger's word, so that the
identity can fail.
"""

import msgspec

from slipstream.config import RunDir
from slipstream.errors import UserError
from slipstream.queue.journal import read_events, read_trajectories
from slipstream.queue.messages import Accounts, LeaseCounts
from slipstream.queue.state import LedgerState
from slipstream.queue.tasks import is_heldout
from slipstream.queue.wire import rows


class RunAccounts(msgspec.Struct):
    """The accounting identity of a run."""

    tokens: Accounts
    trajectories: Accounts
    leases: LeaseCounts

    def holds(self) -> bool:
        return self.tokens.holds() and self.trajectories.holds() and self.leases.holds()


def accounts(run_dir: RunDir) -> RunAccounts:
    """Replays the run's ledger and counts its trajectories. Of a run that goes on: as of about now."""
    if not (run_dir.journal / "ledger.log").is_file():
        raise UserError(f"RUN = {str(run_dir.root)!r}: it has no journal; name the directory of a run")
    state, events = LedgerState(), read_events(run_dir.journal)
    for _, event in events:
        state.apply(event)
    delivered = state.leases.delivered
    tokens, trajectories = state.accounts()
    tokens.generated = trajectories.generated = 0
    for batch, _ in zip(read_trajectories(run_dir.journal), range(delivered), strict=False):
        for row in rows(batch):
            if not is_heldout(row.group):
                tokens.generated += row.tokens
                trajectories.generated += 1
    return RunAccounts(tokens, trajectories, state.lease_counts())
