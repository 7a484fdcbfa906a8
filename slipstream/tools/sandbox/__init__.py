"""A Python sandbox: code that a model wrote, run within limits in a process of its own."""

from slipstream.tools.sandbox.interpreter import Interpreter
from slipstream.tools.sandbox.jail import Backend, Limits
from slipstream.tools.sandbox.sandbox import How, Output, Ran, Sandbox, opened, source, until_over

__all__ = ["Backend", "How", "Interpreter", "Limits", "Output", "Ran", "Sandbox", "opened", "source", "until_over"]
