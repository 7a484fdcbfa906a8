"""Runs inside the sandbox: one namespace, and code that is run in it for as long as the process lives.

Invariant: a piece of code is answered by one byte, after all that it printed was written; nothing it raises ends the
process. Like `inside.py` this is handed over as text.
"""

import ast
import json
import linecache
import resource
import socket
import sys
import traceback
from typing import Any


def run(code: str, name: str, namespace: dict[str, Any]) -> None:
    """Run statements; a last expression that is not None is printed, as at a prompt."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        tree = ast.parse(code, name)
        shown = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(shown, ast.Expr):
            value = eval(compile(ast.Expression(shown.value), name, "eval"), namespace)
            if value is not None:
                print(repr(value))
    except BaseException as error:  # SystemExit too: only this call is over
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        print("".join(traceback.format_exception(type(error), error, frames)), end="")


def serve(control: int, cpu_seconds: int) -> None:
    commands = socket.socket(fileno=control)
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    for number, line in enumerate(commands.makefile("rb"), 1):
        used = resource.getrusage(resource.RUSAGE_SELF)
        spent = int(used.ru_utime + used.ru_stime)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (spent + cpu_seconds + 1, hard))
        run(json.loads(line), f"cell {number}", namespace)
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):  # the code closed or replaced them
            sys.stdout = sys.stderr = open(1, "w", closefd=False)  # noqa: SIM115
        commands.send(b"\n")


if __name__ == "__main__":
    serve(globals()["control"], globals()["cpu_seconds"])
