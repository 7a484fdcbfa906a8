"""Tools that share state within a trajectory: methods of one object, made for it and torn down with it.

Invariant: what a trajectory's calls change is seen by no other trajectory.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.errors import UserError
from slipstream.task import Task
from slipstream.tools.tool import Tool


class ToolSet:
    """Subclass it and put @tool before its methods.

    An instance is made at a trajectory's first call of one of its tools. Calls of its tools run one at a time, in the
    order in which the model wrote them.

    >>> from slipstream.tools import tool
    >>> class Notes(ToolSet):
    ...     def __init__(self) -> None:
    ...         self.lines: list[str] = []
    ...     @tool
    ...     def note(self, line: str) -> int:
    ...         '''Write a line down.'''
    ...         self.lines.append(line)
    ...         return len(self.lines)
    >>> [each.name for each in tools_of(Notes)]
    ['note']
    """

    async def setup(self, task: Task) -> None:
        """Before the first call. What it raises ends the trajectory as `tool_failed`."""

    def save(self) -> bytes | None:
        """The state, for a trajectory that another process may have to go on with (`rollout.park_seconds`); None, the
        default, says that it cannot be had."""
        return None

    def restore(self, state: bytes) -> None:
        """What `save` gave elsewhere; called after `setup`. What it raises begins the trajectory anew."""
        raise NotImplementedError(f"{type(self).__name__} has save() and no restore()")

    async def teardown(self) -> None:
        """After the last call, however the trajectory ended, and also when `setup` raised."""


Factory = Callable[[], ToolSet]  # a subclass, or functools.partial of one with its arguments
AnyTool = Tool | Factory


def kind(factory: Factory) -> type[ToolSet]:
    """The subclass that a factory makes. Raises UserError for anything else."""
    made: Any = factory.func if isinstance(factory, functools.partial) else factory
    if not (isinstance(made, type) and issubclass(made, ToolSet)):
        raise UserError(
            f"{factory!r} is no tool; put @tool before the function, or name a subclass of ToolSet "
            "(functools.partial(Subclass, ...) when it takes arguments)"
        )
    return made


def tools_of(factory: Factory) -> list[Tool]:
    """The tools among a ToolSet's methods, in the order in which they are written, base classes first."""
    made = kind(factory)
    found: dict[str, object] = {}
    for base in reversed(made.__mro__):
        found.update(vars(base))
    tools = [each for each in found.values() if isinstance(each, Tool)]
    if not tools:
        raise UserError(f"{made.__name__} has no tools; put @tool before those of its methods that are")
    return tools


class Toolbox:
    """All tools of an environment by name, with the factory of those that have state."""

    def __init__(self, tools: Sequence[AnyTool]) -> None:
        self.tools: dict[str, Tool] = {}
        self.factories: dict[str, Factory] = {}
        for each in tools:
            if isinstance(each, Tool):
                if each.method:
                    raise UserError(f"tool {each.name} is a method; put its class among the tools, and not the method")
                self._add(each)
                continue
            for one in tools_of(each):
                self._add(one)
                self.factories[one.name] = each

    def _add(self, each: Tool) -> None:
        if each.name in self.tools:
            raise UserError(f"two tools are named {each.name!r}; rename one")
        self.tools[each.name] = each
