"""The accounts of a run, from its journal alone.

Invariant: `generated` is counted in the trajectories themselves and not taken from the ledger's word, so that the
identity can fail.
"""

from pathlib import Path

import msgspec

from slipstream.config import RunDir
from slipstream.errors import UserError
from slipstream.queue.events import Snapshot
from slipstream.queue.journal import named, read_events, read_trajectory
from slipstream.queue.messages import Accounts, LeaseCounts
from slipstream.queue.state import LedgerState
from slipstream.queue.tasks import is_heldout
from slipstream.queue.wire import rows


class Space(msgspec.Struct):
    """What the journal takes of the disk, in bytes."""

    ledger: int = 0
    trajectories: int = 0
    living: int = 0  # of those: what a learner may still get, or get again after a crash


class RunAccounts(msgspec.Struct):
    """The accounting identity of a run."""

    tokens: Accounts = msgspec.field(default_factory=Accounts)
    trajectories: Accounts = msgspec.field(default_factory=Accounts)
    leases: LeaseCounts = msgspec.field(default_factory=LeaseCounts)
    space: Space = msgspec.field(default_factory=Space)

    def holds(self) -> bool:
        return self.tokens.holds() and self.trajectories.holds() and self.leases.holds()


def accounts(run_dir: RunDir) -> RunAccounts:
    """Replays the run's ledger and counts its trajectories. Of a run that goes on: as of about now.

    Of trajectories that `queue.keep` let go, the number is what the ledger said when they went.
    """
    if not (run_dir.journal / "ledger.log").is_file():
        raise UserError(f"RUN = {str(run_dir.root)!r}: it has no journal; name the directory of a run")
    state, events = LedgerState(), list(read_events(run_dir.journal))
    for _, event in events:
        state.apply(event)
    tokens, trajectories = state.accounts()
    begins = events[0][1] if events else None
    tokens.generated = begins.gone_tokens if isinstance(begins, Snapshot) else 0
    trajectories.generated = begins.gone_trajectories if isinstance(begins, Snapshot) else 0
    try:
        for _, place in named(events):
            for row in rows(read_trajectory(run_dir.journal, place)):
                if not is_heldout(row.group):
                    tokens.generated += row.tokens
                    trajectories.generated += 1
    except FileNotFoundError as error:  # queue.keep = "checkpoint" let it go between the two readings
        raise UserError(f"RUN = {str(run_dir.root)!r}: its journal was compacted just now; ask again") from error
    return RunAccounts(tokens, trajectories, state.lease_counts(), _space(run_dir.journal, state))


def _space(folder: Path, state: LedgerState) -> Space:
    return Space(
        ledger=(folder / "ledger.log").stat().st_size,
        trajectories=sum(path.stat().st_size for path in folder.glob("trajectories-*.arrow")),
        living=sum(delivery.place.length for delivery in state.living()),
    )
