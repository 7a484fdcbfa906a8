"""What an agent may call: `@tool`, its schema, and the executor that runs calls within limits."""

from slipstream.tools.executor import Executor, Session, ToolError, ToolResult
from slipstream.tools.python import python_interpreter, python_program
from slipstream.tools.tool import Shown, Tool, ToolFailed, tool
from slipstream.tools.toolset import AnyTool, Toolbox, ToolSet

__all__ = [
    "AnyTool",
    "Executor",
    "Session",
    "Shown",
    "Tool",
    "ToolError",
    "ToolFailed",
    "ToolResult",
    "ToolSet",
    "Toolbox",
    "python_interpreter",
    "python_program",
    "tool",
]
