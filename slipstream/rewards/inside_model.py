"""Runs inside a sandbox with a model's code: does what the tester's process asks of it, over a socket.

Invariant: what leaves is plain data. Nothing that is said here can be a verdict, so nothing here needs to be trusted.
This file is handed over as text.
"""

import json
import socket
import types
from itertools import islice
from typing import Any

MOST_ITEMS = 100_000


class Shown:
    """Objects that the tester holds by number, since they are no plain data."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def encode(self, value: Any) -> Any:
        """JSON for plain data of exact types; whatever only looks like it becomes it here."""
        if value is None or isinstance(value, bool):
            return value
        for kind in (int, float, str):
            if isinstance(value, kind):
                return kind(value)
        if isinstance(value, bytes):
            return ["bytes", value.hex()]
        if isinstance(value, complex):
            return ["complex", value.real, value.imag]
        for kind in (list, tuple, set, frozenset):
            if isinstance(value, kind):
                return [kind.__name__, *map(self.encode, value)]
        if isinstance(value, dict):
            return ["dict", *([self.encode(key), self.encode(each)] for key, each in value.items())]
        self._held.append(value)
        return ["object", len(self._held) - 1]

    def decode(self, said: Any) -> Any:
        if not isinstance(said, list):
            return said
        kind, *parts = said
        if kind == "object":
            return self._held[parts[0]]
        if kind == "dict":
            return {self.decode(key): self.decode(value) for key, value in parts}
        if kind == "bytes":
            return bytes.fromhex(parts[0])
        if kind == "complex":
            return complex(*parts)
        return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(self.decode, parts))


def answer(asked: Any, module: types.ModuleType, shown: Shown) -> Any:
    """One request: names of the module, an attribute, a call, the items of an iterable."""
    kind, target, *rest = asked
    if kind == "names":
        return [name for name in vars(module) if not name.startswith("__")]
    on: Any = module if target is None else shown.decode(target)
    if kind == "get":
        return shown.encode(getattr(on, rest[0]))
    if kind == "items":
        return shown.encode(list(islice(on, MOST_ITEMS)))
    positional, named = shown.decode(rest[0]), shown.decode(rest[1])
    value = on(*positional, **named)
    return [shown.encode(value), shown.encode(positional)]  # arguments too: it may have changed them in place


def serve(channel: int, code: str) -> None:
    connection = socket.socket(fileno=channel)
    requests = connection.makefile("rb")
    module = types.ModuleType("solution")
    shown = Shown()
    broken: BaseException | None = None
    try:
        exec(compile(code, "solution.py", "exec"), vars(module))
    except BaseException as error:  # told at the first question
        broken = error
    for line in requests:
        try:
            if broken is not None:
                raise broken
            said = {"value": answer(json.loads(line), module, shown)}
        except BaseException as error:
            said = {"raised": type(error).__name__, "text": str(error)[:1000]}
        connection.sendall(json.dumps(said).encode() + b"\n")


if __name__ == "__main__":
    serve(globals()["channel"], globals()["code"])
