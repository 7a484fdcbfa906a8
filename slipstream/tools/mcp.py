"""The tools of MCP servers, over stdio or HTTP.

Invariant: each trajectory has a connection of its own, opened at its first call and closed with it; over stdio that is
a process of its own. What the server says against a call is shown to the model; a connection that broke is not the
model's fault, and ends the trajectory as `tool_failed`.
"""

import asyncio
import threading
import types
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from slipstream.errors import UserError
from slipstream.extras import needs
from slipstream.task import Task
from slipstream.tools.tool import Tool, ToolFailed
from slipstream.tools.toolset import Factory, ToolSet

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client._transport import TransportStreams  # nowhere else, and it is what Client wants
    from mcp.types import CallToolResult
    from mcp.types import Tool as Description

LISTING_SECONDS = 60.0  # for a server to start and to say which tools it has

Connect = Callable[[], "Client"]


def mcp_stdio(
    command: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    folder: str | Path | None = None,
    only: tuple[str, ...] = (),
) -> Factory:
    """The tools (or `only` those named) of a server that is a program, spoken with over its stdin and stdout."""

    def connect() -> "Client":
        from mcp import Client, StdioServerParameters

        return Client(
            StdioServerParameters(command=command, args=list(arguments), env=dict(env) if env else None, cwd=folder)
        )

    return _tools(" ".join((command, *arguments)), connect, only)


def mcp_http(url: str, *, headers: Mapping[str, str] | None = None, only: tuple[str, ...] = ()) -> Factory:
    """The tools (or `only` those named) of a server at this address, spoken with over streamable HTTP."""

    def connect() -> "Client":
        from mcp import Client

        return Client(_over_http(url, headers))

    return _tools(url, connect, only)


@asynccontextmanager
async def _over_http(url: str, headers: Mapping[str, str] | None) -> "AsyncGenerator[TransportStreams]":
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    seconds = httpx2.Timeout(30, read=None)  # an answer may take as long as its call may
    async with (
        httpx2.AsyncClient(headers=headers, timeout=seconds) as http,
        streamable_http_client(url, http_client=http) as streams,
    ):
        yield streams


def _tools(server: str, connect: Connect, only: tuple[str, ...]) -> Factory:
    """A ToolSet of them. The server is asked once for what it has, when the environment is loaded."""
    with needs("mcp", "mcp", "an MCP server's tools"):
        import mcp  # noqa: F401  # pyright: ignore[reportUnusedImport]
    listed = {each.name: each for each in _elsewhere(_list(server, connect))}
    if missing := [name for name in only if name not in listed]:
        raise UserError(f"MCP server {server!r} has no tool {', '.join(missing)}; it has {', '.join(listed) or 'none'}")
    if not listed:
        raise UserError(f"MCP server {server!r} has no tools")
    tools = {name: _tool(each) for name, each in listed.items() if not only or name in only}
    body: dict[str, Any] = {**tools, "server": (server, connect)}
    return types.new_class("McpTools", (Connection,), exec_body=lambda namespace: namespace.update(body))


def _tool(listed: "Description") -> Tool:
    async def call(self: "Connection", arguments: dict[str, Any]) -> str:
        return await self.ask(listed.name, arguments)

    return Tool.described(call, listed.name, listed.description or listed.title or listed.name, listed.input_schema)


async def _list(server: str, connect: Connect) -> "list[Description]":
    found: list[Description] = []
    try:
        async with asyncio.timeout(LISTING_SECONDS), connect() as client:
            cursor: str | None = None
            while True:
                page = await client.list_tools(cursor=cursor)
                found += page.tools
                cursor = page.next_cursor
                if not cursor:
                    return found
    except TimeoutError as error:
        raise UserError(f"MCP server {server!r} did not list its tools within {LISTING_SECONDS:g} s") from error
    except Exception as error:  # of the program, the network or the protocol
        raise UserError(f"MCP server {server!r} did not list its tools: {_first(error)}") from error


def _elsewhere(work: "Coroutine[Any, Any, list[Description]]") -> "list[Description]":
    """What a coroutine returns, from a place that may be inside an event loop."""
    ended: list[list[Description] | BaseException] = []

    def run() -> None:
        try:
            ended.append(asyncio.run(work))
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, name="slipstream mcp")
    thread.start()
    thread.join()
    if isinstance(ended[0], BaseException):
        raise ended[0]
    return ended[0]


class Connection(ToolSet):
    """One trajectory's. A task of its own holds it, since the one that opens a connection has to close it."""

    server: ClassVar[tuple[str, Connect]]

    def __init__(self) -> None:
        self._over = asyncio.Event()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._holding: asyncio.Task[None] | None = None

    async def setup(self, task: Task) -> None:
        self._holding = asyncio.create_task(self._hold())
        await asyncio.wait({self._client, self._holding}, return_when=asyncio.FIRST_COMPLETED)
        if not self._client.done():
            raise ToolFailed(f"MCP server {self.server[0]!r} ended at once")
        self._client.result()

    async def _hold(self) -> None:
        try:
            async with self.server[1]() as client:
                self._client.set_result(client)
                await self._over.wait()
        except Exception as error:
            if not self._client.done():
                self._client.set_exception(ToolFailed(f"MCP server {self.server[0]!r}: {_first(error)}"))

    async def teardown(self) -> None:
        self._over.set()
        if self._holding is not None:
            if not self._client.done():
                self._holding.cancel()
            await asyncio.wait({self._holding})

    async def ask(self, name: str, arguments: dict[str, Any]) -> str:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            result = await self._client.result().call_tool(name, arguments)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise ToolFailed(f"MCP server {self.server[0]!r} is gone") from error
            raise ValueError(error.message) from error
        if result.is_error:
            raise ValueError(_text(result))
        return _text(result)


def _text(result: "CallToolResult") -> str:
    from mcp.types import TextContent

    pieces = [each.text if isinstance(each, TextContent) else f"[{each.type}]" for each in result.content]
    return "\n".join(pieces)


def _first(error: BaseException) -> str:
    """What went wrong within groups of groups, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(f"{type(error).__name__}: {error}".split())
