"""What an agent may call: `@tool`, its schema, and the executor that runs calls within limits."""

from slipstream.tools.executor import Executor, ToolError, ToolResult
from slipstream.tools.tool import Tool, ToolFailed, tool

__all__ = ["Executor", "Tool", "ToolError", "ToolFailed", "ToolResult", "tool"]
