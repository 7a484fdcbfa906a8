"""Runs inside a sandbox with the tests, and never with the model's code: that is a process behind a socket.

Invariant: the verdict, one JSON line on stdout, comes from comparisons of plain data made here. The model's process is
told what to call with what, and never what should come of it. This file is handed over as text.
"""

import ast
import builtins
import io
import json
import os
import socket
import sys
import types
import unittest
from typing import Any

LONGEST_ANSWER = 1 << 24


class Broken(Exception):
    """The tests themselves cannot be run: the task is to blame."""


class Gone(BaseException):
    """The model's process ended, or said what is no answer. No test that expects an Exception is content with it."""


class RemoteError(Exception):
    """The model's code raised what is no built-in exception."""


class Connection:
    def __init__(self, channel: int) -> None:
        self._socket = socket.socket(fileno=channel)
        self._answers = self._socket.makefile("rb")

    def ask(self, *request: Any) -> Any:
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            line = self._answers.readline(LONGEST_ANSWER)
            if not line.endswith(b"\n"):
                raise Gone("the program ended")
            said = json.loads(line)
            if "value" in said:
                return said["value"]
            name, text = str(said["raised"]), str(said["text"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise Gone(f"the program cannot be understood: {error}") from None
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                raised = kind(text)
            except TypeError:
                raised = RemoteError(f"{name}: {text}")
            raise raised
        if isinstance(kind, type) and issubclass(kind, BaseException):
            raise Gone(f"the program raised {name}")
        raise RemoteError(f"{name}: {text}")

    def encode(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return ["object", object.__getattribute__(value, "_number")]
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) is bytes:
            return ["bytes", value.hex()]
        if type(value) is complex:
            return ["complex", value.real, value.imag]
        if type(value) in (list, tuple, set, frozenset):
            return [type(value).__name__, *map(self.encode, value)]
        if isinstance(value, dict):
            return ["dict", *([self.encode(key), self.encode(each)] for key, each in value.items())]
        raise TypeError(f"a test cannot hand over a {type(value).__name__}: plain data only")

    def decode(self, said: Any) -> Any:
        """Plain data; an object of the model's own is a Remote."""
        try:
            if not isinstance(said, list):
                return said
            kind, *parts = said
            if kind == "object":
                return Remote(self, int(parts[0]))
            if kind == "dict":
                return {self.decode(key): self.decode(value) for key, value in parts}
            if kind == "bytes":
                return bytes.fromhex(parts[0])
            if kind == "complex":
                return complex(*parts)
            return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(self.decode, parts))
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise Gone(f"the program cannot be understood: {error}") from None


class Remote:
    """Something of the model's that is no plain data. It equals nothing but itself, and is neither true nor false."""

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection, self._number = connection, number

    def __call__(self, *positional: Any, **named: Any) -> Any:
        link = self._connection
        said = link.ask("call", link.encode(self), link.encode(list(positional)), link.encode(named))
        if not (isinstance(said, list) and len(said) == 2):
            raise Gone("the program cannot be understood")
        value, after = link.decode(said[0]), link.decode(said[1])
        for ours, theirs in zip(positional, after, strict=True):
            if type(ours) is list and type(theirs) is list:
                ours[:] = theirs
            elif isinstance(ours, dict | set) and type(theirs) is type(ours):
                ours.clear()
                ours.update(theirs)
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._connection.decode(self._connection.ask("get", self._connection.encode(self), name))

    def _special(self, name: str, *arguments: Any) -> Any:
        link = self._connection
        return link.decode(link.ask("get", link.encode(self), name))(*arguments)

    def __iter__(self) -> Any:
        return iter(self._connection.decode(self._connection.ask("items", self._connection.encode(self))))

    def __len__(self) -> int:
        try:
            return int(self._special("__len__"))
        except AttributeError as error:  # list() asks, and takes only this for a no
            raise TypeError(str(error)) from None

    def __getitem__(self, key: Any) -> Any:
        return self._special("__getitem__", key)

    def __str__(self) -> str:
        return str(self._special("__str__"))

    def __bool__(self) -> bool:
        raise TypeError("an object is neither right nor wrong: compare plain data")


def names_of(tests: ast.Module, connection: Connection) -> dict[str, Any]:
    """What the tests name and neither Python nor they themselves define: the model's. Nothing else of it is seen."""
    named = {node.id for node in ast.walk(tests) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    there = connection.ask("names", None)
    if not isinstance(there, list):
        raise Gone("the program cannot be understood")
    wanted = (named & set(map(str, there))) - set(dir(builtins))
    return {name: connection.decode(connection.ask("get", None, name)) for name in wanted}


def solution_module(connection: Connection) -> types.ModuleType:
    """For tests that begin with `from solution import f`."""

    class Solution(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return connection.decode(connection.ask("get", None, name))

    return Solution("solution")


def run(source: str, entry_point: str, connection: Connection) -> str:
    """'' when all tests passed, else why not. Raises Broken."""
    try:
        tree = ast.parse(source, "tests.py")
    except SyntaxError as error:
        raise Broken(f"the tests are no Python: {error}") from error
    namespace: dict[str, Any] = {"__name__": "tests", **names_of(tree, connection)}
    sys.modules["solution"] = solution_module(connection)
    before = set(namespace)
    exec(compile(tree, "tests.py", "exec"), namespace)
    defined = {name: value for name, value in namespace.items() if name not in before}
    count = sum(isinstance(node, ast.Assert) for node in tree.body)
    if entry_point and callable(defined.get("check")):
        defined["check"](connection.decode(connection.ask("get", None, entry_point)))
        count += 1
    for name, value in defined.items():
        if name.startswith("test") and isinstance(value, types.FunctionType):
            value()
            count += 1
    cases = [value for value in defined.values() if isinstance(value, type) and issubclass(value, unittest.TestCase)]
    if cases:
        load = unittest.defaultTestLoader.loadTestsFromTestCase
        suite = unittest.TestSuite(load(case) for case in cases)
        result = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
        if not result.wasSuccessful():
            return (result.errors + result.failures)[0][1].strip().splitlines()[-1]
        count += result.testsRun
    if not count:
        raise Broken("there is no assert, test function or TestCase in the tests")
    return ""


def main(channel: int, tests: str, entry_point: str, verdict: int) -> None:
    try:
        why = run(tests, entry_point, Connection(channel))
        said = {"passed": not why, "why": why}
    except Broken as error:
        said = {"broken": str(error)}
    except BaseException as error:  # of a test, or of the code that it called
        said = {"passed": False, "why": f"{type(error).__name__}: {error}"[:1000]}
    os.write(verdict, json.dumps(said).encode())
    os._exit(0)


if __name__ == "__main__":
    main(globals()["channel"], globals()["tests"], globals()["entry_point"], globals()["verdict"])
