"""`@tool`: a function that an agent may call, with a JSON schema from its type hints and docstring.

Invariant: a Tool that exists is complete: it has a description, and a type for every parameter. What is missing is
refused where the function is written, not where a model first calls it.
"""

import inspect
import types
from collections.abc import Callable
from typing import Any, Protocol, get_type_hints

import msgspec

from slipstream.errors import UserError

SECTIONS = ("args:", "arguments:", "returns:", "yields:", "raises:", "example:", "examples:", "note:", "notes:")


class ToolFailed(Exception):
    """Raise it in a tool to say that infrastructure broke, through no fault of the model: the trajectory then ends as
    `tool_failed`. Any other exception is shown to the model as an error it may correct."""


class Shown(Protocol):
    """What a model is told of a tool: all that a chat template needs, whoever runs it."""

    name: str
    schema: dict[str, Any]  # name, description, and a JSON schema of the parameters


class Tool:
    """A function with a name, a description and a schema of its arguments. Still callable as the function it was."""

    def __init__(self, function: Callable[..., Any], *, at_once: int = 0, retries: int = 0) -> None:
        if not inspect.isroutine(function):  # a functools.partial has neither name nor docstring of its own
            raise UserError(f"@tool needs a function with a name, not {function!r}: wrap it in a def")
        self.name: str = function.__name__
        self.function = function
        self.method = next(iter(inspect.signature(function).parameters), "") == "self"
        if at_once < 0 or retries < 0:
            raise UserError(f"tool {self.name}: at_once = {at_once}, retries = {retries}; write numbers from 0 on")
        self.at_once, self.retries = at_once, retries
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise UserError(f"tool {self.name} yields; let it return one value")
        self.description, described = read_docstring(self.name, function)
        self._arguments: type[msgspec.Struct] | None = arguments_struct(self.name, function)
        self.schema = self._schema(self._arguments, described)

    @classmethod
    def described(cls, function: Callable[..., Any], name: str, description: str, parameters: dict[str, Any]) -> "Tool":
        """A tool that somebody else describes and checks: `function(self, arguments)` is handed any JSON object."""
        made = cls.__new__(cls)
        made.name, made.description, made.function, made.method = name, description, function, True
        made.at_once = made.retries = 0
        made._arguments = None
        made.schema = {"name": name, "description": description, "parameters": {"properties": {}, **parameters}}
        return made

    def read(self, arguments: str) -> dict[str, Any]:
        """A call's arguments (a JSON object) by parameter. Raises what msgspec does when they are not as described."""
        if self._arguments is None:
            return {"arguments": msgspec.json.decode(arguments, type=dict[str, Any])}
        decoded = msgspec.json.decode(arguments, type=self._arguments)
        return {key: getattr(decoded, key) for key in decoded.__struct_fields__}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __get__(self, instance: object | None, owner: type | None = None) -> Any:
        """As a method of its object, where it is one."""
        return self if instance is None else types.MethodType(self.function, instance)

    def _schema(self, arguments: type[msgspec.Struct], described: dict[str, str]) -> dict[str, Any]:
        """The function schema that chat templates render: name, description, JSON schema of the parameters."""
        (reference,), components = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
        body = components.pop(reference["$ref"].rsplit("/", 1)[1])
        properties: dict[str, dict[str, Any]] = body["properties"]
        for name, text in described.items():
            properties[name] = {**properties[name], "description": text}
        parameters: dict[str, Any] = {
            "type": "object",
            "properties": properties,
            "required": body.get("required", []),
        }
        if components:
            parameters["$defs"] = components
        return {"name": self.name, "description": self.description, "parameters": parameters}


def tool(function: Callable[..., Any] | None = None, *, at_once: int = 0, retries: int = 0) -> Any:
    """Make a tool of a sync or async function, or of a method of a ToolSet.

    `at_once`: as many of its calls run side by side in one rollouter, others wait for their turn (0: no limit).
    `retries`: a call that raised or timed out is made again so often; only for what may be done twice.

    >>> @tool
    ... def add(a: int, b: int) -> int:
    ...     '''Add two whole numbers.'''
    ...     return a + b
    >>> add.schema["parameters"]["required"]
    ['a', 'b']
    """

    def make(wrapped: Callable[..., Any]) -> Tool:
        return Tool(wrapped, at_once=at_once, retries=retries)

    return make if function is None else make(function)


def arguments_struct(name: str, function: Callable[..., Any]) -> type[msgspec.Struct]:
    """The parameters as a Struct: what decodes a call's arguments also validates them."""
    try:
        hints = get_type_hints(function, include_extras=True)  # Annotated[int, msgspec.Meta(ge=0)] is checked too
    except NameError as error:
        raise UserError(f"tool {name}: a type hint cannot be resolved: {error}") from error
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for index, parameter in enumerate(inspect.signature(function).parameters.values()):
        if index == 0 and parameter.name == "self":
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise UserError(f"tool {name}: {parameter} must be an ordinary parameter, which is passed by its name")
        if parameter.name not in hints:
            raise UserError(f"tool {name}: parameter {parameter.name} has no type hint; write {parameter.name}: str")
        try:
            msgspec.json.schema(hints[parameter.name])
        except TypeError as error:
            hint = hints[parameter.name]
            raise UserError(f"tool {name}: parameter {parameter.name} is of {hint}, which JSON has not") from error
        if parameter.default is parameter.empty:
            fields.append((parameter.name, hints[parameter.name]))
        else:
            fields.append((parameter.name, hints[parameter.name], parameter.default))
    try:
        return msgspec.defstruct(f"{name}_arguments", fields, kw_only=True, forbid_unknown_fields=True)
    except TypeError as error:
        raise UserError(f"tool {name}: a list or dict as default is shared by all calls; write None") from error


def read_docstring(name: str, function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """What stands before the first section, and the sentences of the `Args:` section by parameter."""
    text = inspect.getdoc(function) or ""
    if not text.strip():
        raise UserError(f"tool {name} has no docstring; its first lines are what the model reads about it: write one")
    parameters = inspect.signature(function).parameters
    summary: list[str] = []
    described: dict[str, str] = {}
    section, last = "", ""
    for line in text.splitlines():
        if line.strip().lower() in SECTIONS and not line.startswith(" "):
            section = line.strip().lower()
        elif not section:
            summary.append(line)
        elif section in ("args:", "arguments:") and line.strip():
            head, colon, tail = line.strip().partition(":")
            word = head.split("(")[0].strip()
            if colon and word in parameters:
                last = word
                described[last] = tail.strip()
            elif last:
                described[last] += " " + line.strip()
    return " ".join(" ".join(summary).split()), described
