"""An environment: the tools an agent may call, the rewards that score it, and the system prompt before each task."""

from collections.abc import Sequence
from typing import Any

from slipstream.errors import UserError
from slipstream.rewards import Reward
from slipstream.task import Task
from slipstream.tools import Executor, Tool
from slipstream.userfile import load_object


class Environment:
    """What a config's `environment.path` names.

    >>> from slipstream.rewards import exact_match
    >>> Environment(rewards=[exact_match]).tools
    []
    """

    def __init__(self, *, rewards: Sequence[Reward], tools: Sequence[Tool] = (), system: str = "") -> None:
        for each in tools:
            if not isinstance(each, Tool):
                raise UserError(f"Environment(tools=...): {each!r} is no tool; put @tool before the function")
        for each in rewards:
            if not isinstance(each, Reward):
                raise UserError(f"Environment(rewards=...): {each!r} is no reward; put @reward before the function")
        if not rewards:
            raise UserError("Environment(rewards=[]): at least one reward is needed to learn from")
        self.tools, self.rewards, self.system = list(tools), list(rewards), system
        Executor(self.tools, seconds=1)  # two tools of one name are refused here, not in the first rollout

    def first_messages(self, task: Task) -> list[dict[str, Any]]:
        system: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        return system + task.messages()


def load_environment(spec: str) -> Environment:
    """The Environment that FILE.py:NAME names. Raises UserError."""
    found = load_object(spec, "environment.path")
    if not isinstance(found, Environment):
        raise UserError(f"environment.path = {spec!r} is a {type(found).__name__}; it must be an Environment")
    return found
