"""`@tool`: a function that an agent may call, with a JSON schema from its type hints and docstring.

Invariant: a Tool that exists is complete: it has a description, and a type for every parameter. What is missing is
refused where the function is written, not where a model first calls it.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec

from slipstream.errors import UserError


class ToolFailed(Exception):
    """Raise it in a tool to say that infrastructure broke, through no fault of the model: the trajectory then ends as
    `tool_failed`. Any other exception is shown to the model as an error it may correct."""


class Tool:
    """A function with a name, a description and a schema of its arguments. Still callable as the function it was."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if isinstance(function, functools.partial) or not inspect.isroutine(function):
            raise UserError(f"@tool needs a function with a name, not {function!r}: wrap it in a def")
        self.name: str = function.__name__
        self.function = function
        self.is_async = inspect.iscoroutinefunction(function)
        summary, described = read_docstring(self.name, inspect.getdoc(function) or "")
        self.description = summary
        self.arguments = arguments_struct(self.name, function)
        self.schema = self._schema(described)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def _schema(self, described: dict[str, str]) -> dict[str, Any]:
        """The function schema that chat templates render: name, description, JSON schema of the parameters."""
        (reference,), components = msgspec.json.schema_components([self.arguments], ref_template="#/$defs/{name}")
        body = components.pop(reference["$ref"].rsplit("/", 1)[1])
        properties: dict[str, dict[str, Any]] = body["properties"]
        for name in properties:
            if name in described:
                properties[name] = {**properties[name], "description": described[name]}
        parameters = {"type": "object", "properties": properties, "required": body.get("required", [])}
        if components:
            parameters["$defs"] = components
        return {"name": self.name, "description": self.description, "parameters": parameters}


def tool(function: Callable[..., Any]) -> Tool:
    """Make a tool of a sync or async function.

    >>> @tool
    ... def add(a: int, b: int) -> int:
    ...     '''Add two whole numbers.'''
    ...     return a + b
    >>> add.schema["parameters"]["required"]
    ['a', 'b']
    """
    return Tool(function)


def arguments_struct(name: str, function: Callable[..., Any]) -> type[msgspec.Struct]:
    """The parameters as a Struct: what decodes a call's arguments also validates them."""
    hints = get_type_hints(function)
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise UserError(f"tool {name}: parameter {parameter.name} must be an ordinary one that has a name")
        if parameter.name not in hints:
            raise UserError(f"tool {name}: parameter {parameter.name} has no type hint; write {parameter.name}: str")
        if parameter.default is parameter.empty:
            fields.append((parameter.name, hints[parameter.name]))
        else:
            fields.append((parameter.name, hints[parameter.name], parameter.default))
    return msgspec.defstruct(f"{name}_arguments", fields, kw_only=True, forbid_unknown_fields=True)


def read_docstring(name: str, text: str) -> tuple[str, dict[str, str]]:
    """The summary, and the sentences of an `Args:` section by parameter."""
    if not text.strip():
        raise UserError(f"tool {name} has no docstring; its first lines are what the model reads about it: write one")
    summary, _, rest = text.partition("\nArgs:")
    described: dict[str, str] = {}
    last = ""
    for line in rest.splitlines():
        if not line.strip():
            continue
        if not line.startswith(" "):
            break  # the next section
        head, colon, tail = line.strip().partition(":")
        if colon and head.split(" ")[0].isidentifier():
            last = head.split(" ")[0]
            described[last] = tail.strip()
        elif last:
            described[last] += " " + line.strip()
    return " ".join(summary.split()), described
