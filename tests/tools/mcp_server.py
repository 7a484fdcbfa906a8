"""An MCP server with state, for the tests: over stdio, or over HTTP on a free port that it prints."""

import os
import socket
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shelf", log_level="CRITICAL")
counts: dict[str, int] = {}


@server.tool()
def take(item: str, number: int = 1) -> int:
    """Take some of an item; how many were taken in all."""
    if number < 1:
        raise ToolError("take at least one")
    counts[item] = counts.get(item, 0) + number
    return counts[item]


@server.tool()
def leave() -> str:
    """The server's process ends."""
    os._exit(3)


if __name__ == "__main__":
    if sys.argv[1:] == ["http"]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        print(port, flush=True)
        server.run("streamable-http", host="127.0.0.1", port=port)
    else:
        server.run("stdio")
