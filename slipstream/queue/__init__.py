"""The broker process and its clients: wire format, ledger, journal."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.queue.journal import accounts
    from slipstream.queue.packed import Packed, packed
    from slipstream.queue.wire import decode, encode

__all__ = ["Packed", "accounts", "decode", "encode", "packed"]

_HOMES = {"encode": "wire", "decode": "wire", "packed": "packed", "Packed": "packed", "accounts": "journal"}


def __getattr__(name: str) -> Any:
    """pyarrow and torch are imported by who needs them, not by `import slipstream`."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"slipstream.queue.{_HOMES[name]}"), name)
