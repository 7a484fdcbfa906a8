"""MCP servers as tools, against a real server process: over stdio, over HTTP, and one that dies."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slipstream import Task
from slipstream.errors import UserError
from slipstream.tools import Executor, Session, Toolbox, ToolError, ToolFailed, ToolResult, mcp_http, mcp_stdio
from slipstream.tools.toolset import Factory

pytest.importorskip("mcp")
TASK = Task(id="t", prompt="?")
SERVER = str(Path(__file__).with_name("mcp_server.py"))


@pytest.fixture(scope="module")
def over_stdio() -> Factory:
    return mcp_stdio(sys.executable, SERVER)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    process = subprocess.Popen([sys.executable, SERVER, "http"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            break
        except OSError:
            assert process.poll() is None
            time.sleep(0.02)
    yield f"http://127.0.0.1:{port}/mcp"
    process.terminate()
    process.wait()


async def check_calls(session: Session) -> None:
    assert await session.call("take", '{"item": "tea", "number": 2}') == ToolResult("2")
    wrong = await session.call("take", '{"item": "tea", "number": "many"}')
    assert wrong.error is ToolError.RAISED
    assert "valid integer" in wrong.text
    refused = await session.call("take", '{"item": "tea", "number": 0}')
    assert refused.error is ToolError.RAISED
    assert "take at least one" in refused.text
    assert (await session.call("take", "[]")).error is ToolError.BAD_ARGUMENTS


def servers() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if SERVER in each.cmdline()]


async def test_over_stdio_each_trajectory_has_a_server_of_its_own_that_ends_with_it(over_stdio: Factory) -> None:
    box = Toolbox([over_stdio])
    schema = box.tools["take"].schema
    assert schema["description"] == "Take some of an item; how many were taken in all."
    assert schema["parameters"]["required"] == ["item"]
    assert schema["parameters"]["properties"]["number"]["type"] == "integer"
    before = len(servers())
    executor = Executor(box, 30)

    async def trajectory() -> None:
        async with executor.session(TASK) as session:
            await check_calls(session)
            assert await session.call("take", '{"item": "tea"}') == ToolResult("3")

    async def broken() -> None:
        async with executor.session(TASK) as session:
            with pytest.raises(ToolFailed, match=r"mcp_server\.py' is gone"):  # it is not the model's fault
                await session.call("leave", "{}")

    await asyncio.gather(trajectory(), broken())
    async with executor.session(TASK) as session:
        assert await session.call("take", '{"item": "tea"}') == ToolResult("1")
    assert len(servers()) == before


async def test_over_http(url: str) -> None:
    box = Toolbox([mcp_http(url, only=("take",))])  # inside an event loop, as a rollouter loads it
    assert list(box.tools) == ["take"]
    async with Executor(box, 30).session(TASK) as session:
        await check_calls(session)


def test_servers_that_are_none_are_refused_in_one_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^MCP server '/none/such' did not list its tools: .*No such file[^\n]*$"):
        mcp_stdio("/none/such")
    with pytest.raises(UserError, match=r"^MCP server '[^\n]*false' did not list its tools: [^\n]*$"):
        mcp_stdio("false")
    with pytest.raises(UserError, match=r"has no tool steal; it has take, leave$"):
        mcp_http(url, only=("steal",))
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(
        UserError, match=r"^an MCP server's tools needs the package mcp: pip install 'slipstream\[mcp]'$"
    ):
        mcp_http(url)
