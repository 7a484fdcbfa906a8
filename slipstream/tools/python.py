"""Python as a tool: a program at a time, or an interpreter that each trajectory keeps.

Invariant: whatever the code does, the model is shown what it printed up to then and, in brackets, how it ended.
"""

import functools

from slipstream.tools.sandbox import How, Interpreter, Limits, Ran, Sandbox
from slipstream.tools.sandbox.sandbox import AT_ONCE, STANDARD
from slipstream.tools.tool import Tool, tool
from slipstream.tools.toolset import Factory, ToolSet


def python_program(limits: Limits = STANDARD, *, packages: bool = False) -> Tool:
    """The tool `python`, which runs each call's code as a program of its own."""
    sandbox = Sandbox(limits, packages=packages)

    @tool(at_once=AT_ONCE)
    async def python(code: str) -> str:
        """Run a Python program and show what it prints.

        Args:
            code: the whole program
        """
        return shown(await sandbox.run(code), limits)

    return python


def python_interpreter(limits: Limits = STANDARD, *, packages: bool = False) -> Factory:
    """The tool `python`, with variables that stay from call to call of a trajectory."""
    return functools.partial(PythonInterpreter, Sandbox(limits, packages=packages))


class PythonInterpreter(ToolSet):
    """One interpreter, started at the first call."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._limits = sandbox.limits
        self._interpreter = Interpreter(sandbox)

    async def teardown(self) -> None:
        await self._interpreter.close()

    @tool(at_once=AT_ONCE)
    async def python(self, code: str) -> str:
        """Run Python code and show what it prints, and the value of its last line. Variables stay for later calls.

        Args:
            code: one or more lines of Python
        """
        return shown(await self._interpreter.run(code), self._limits)


def shown(ran: Ran, limits: Limits) -> str:
    """What the model reads."""
    notes: list[str] = []
    if ran.how is How.TIMED_OUT:
        notes.append(f"it was ended after {limits.seconds:g} s")
    elif ran.how is How.FLOODED:
        notes.append(f"it was ended after printing {limits.output_bytes} bytes")
    elif ran.code < 0:
        notes.append(f"it was ended by signal {-ran.code}; it may use {limits.cpu_seconds} s and {limits.memory_mb} MB")
    if ran.lost:
        notes.append("the interpreter is gone and its variables with it; the next call starts a new one")
    if not ran.output and not notes:
        notes.append("nothing was printed")
    return ran.output + (f"[{'; '.join(notes)}]" if notes else "")
