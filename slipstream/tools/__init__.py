"""What an agent may call: `@tool`, its schema, and the executor that runs calls within limits."""

from slipstream.tools.executor import Executor, Session, ToolError, ToolResult
from slipstream.tools.files import Files
from slipstream.tools.http import fetch
from slipstream.tools.mcp import mcp_http, mcp_stdio
from slipstream.tools.python import python_interpreter, python_program
from slipstream.tools.search import search
from slipstream.tools.tool import Shown, Tool, ToolFailed, tool
from slipstream.tools.toolset import AnyTool, Toolbox, ToolSet

__all__ = [
    "AnyTool",
    "Executor",
    "Files",
    "Session",
    "Shown",
    "Tool",
    "ToolError",
    "ToolFailed",
    "ToolResult",
    "ToolSet",
    "Toolbox",
    "fetch",
    "mcp_http",
    "mcp_stdio",
    "python_interpreter",
    "python_program",
    "search",
    "tool",
]
