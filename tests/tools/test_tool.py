"""@tool: schema from hints and docstring, and what is refused at the door."""

import functools
from typing import Annotated, Literal

import msgspec
import pytest

from slipstream import tool
from slipstream.errors import UserError


@tool
def search(
    query: str,
    limit: Annotated[int, msgspec.Meta(ge=1)] = 5,
    kind: Literal["web", "news"] = "web",
    tags: list[str] | None = None,
) -> str:
    """Search the
    web.

    Finds pages: good ones.

    Args:
        query: what to look for,
            in a few words
        limit (int): how many
    Returns:
        query: not this
    """
    return f"{query} {limit} {kind} {tags}"


def test_schema():
    assert search.name == "search"
    assert search.description == "Search the web. Finds pages: good ones."
    parameters = search.schema["parameters"]
    assert parameters["required"] == ["query"]
    assert parameters["properties"] == {
        "query": {"type": "string", "description": "what to look for, in a few words"},
        "limit": {"type": "integer", "minimum": 1, "default": 5, "description": "how many"},
        "kind": {"enum": ["news", "web"], "default": "web"},
        "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}], "default": None},
    }


def test_a_tool_is_still_the_function():
    assert search("x", tags=["y"]) == "x 5 web ['y']"


class Point(msgspec.Struct):
    x: int


def test_structs_are_part_of_the_schema():
    @tool
    def move(to: Point) -> str:
        """Go there."""
        return str(to.x)

    assert move.schema["parameters"]["properties"]["to"] == {"$ref": "#/$defs/Point"}
    assert "Point" in move.schema["parameters"]["$defs"]


class Callable:
    def __call__(self, text: str) -> str:
        """Look."""
        return text


def undocumented(text: str) -> str:
    return text


def unhinted(text) -> str:
    """Look."""
    return text


def many(*texts: str) -> str:
    """Look."""
    return "".join(texts)


def keywords(**texts: str) -> str:
    """Look."""
    return "".join(texts)


def yields(text: str):
    """Look."""
    yield text


def strange(what: Callable) -> str:
    """Look."""
    return str(what)


def missing(what: "Nowhere") -> str:  # noqa: F821  # pyright: ignore
    """Look."""
    return str(what)


def shared(what: list[int] = [1]) -> str:  # noqa: B006
    """Look."""
    return str(what)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (undocumented, "no docstring"),
        (unhinted, "parameter text has no type hint; write text: str"),
        (many, "texts"),
        (keywords, "texts"),
        (yields, "yields"),
        (strange, r"parameter what is of <class .*Callable.>, which JSON has not"),
        (missing, "Nowhere"),
        (shared, "write None"),
        (functools.partial(undocumented, text="x"), "wrap it in a def"),
        (Callable(), "wrap it in a def"),
    ],
)
def test_refused(function, says):
    with pytest.raises(UserError, match=says) as refused:
        tool(function)
    assert "\n" not in str(refused.value)
