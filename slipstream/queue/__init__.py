"""The broker process and its clients: wire format, ledger, journal."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.queue.audit import RunAccounts, accounts
    from slipstream.queue.journal import delivered_leases, read_trajectories
    from slipstream.queue.tasks import is_heldout
    from slipstream.queue.tensors import Packed, packed
    from slipstream.queue.wire import Malformed, decode, encode

__all__ = [
    "Malformed",
    "Packed",
    "RunAccounts",
    "accounts",
    "decode",
    "delivered_leases",
    "encode",
    "is_heldout",
    "packed",
    "read_trajectories",
]

# No module may have the name of a thing exported here: importing the module would put it in the thing's place.
_HOMES = {
    "encode": "wire",
    "decode": "wire",
    "Malformed": "wire",
    "packed": "tensors",
    "Packed": "tensors",
    "accounts": "audit",
    "RunAccounts": "audit",
    "is_heldout": "tasks",
    "delivered_leases": "journal",
    "read_trajectories": "journal",
}


def __getattr__(name: str) -> Any:
    """pyarrow and torch are imported by who needs them, not by `import slipstream`."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"slipstream.queue.{_HOMES[name]}"), name)
