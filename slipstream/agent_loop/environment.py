"""An environment: the tools an agent may call, the rewards that score it, and the system prompt before each task."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.agent_loop.chat import Agent
from slipstream.errors import UserError
from slipstream.rewards import Reward
from slipstream.task import Task
from slipstream.tools import AnyTool, Toolbox
from slipstream.userfile import load_object


class Environment:
    """What a config's `environment.path` names.

    >>> from slipstream.rewards import exact_match
    >>> Environment(rewards=[exact_match]).tools
    []
    """

    def __init__(
        self,
        *,
        rewards: Sequence[Reward],
        tools: Sequence[AnyTool] = (),
        system: str = "",
        agent: Agent | None = None,
    ) -> None:
        """`agent`: who leads the conversation, where it is not enough to run the tools that the model calls."""
        for each in rewards:
            if not isinstance(each, Reward):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UserError(f"Environment(rewards=...): {each!r} is no reward; put @reward before the function")
        if not rewards:
            raise UserError("Environment(rewards=[]): at least one reward is needed to learn from")
        names = [each.name for each in rewards]
        if len(set(names)) < len(names):
            raise UserError(f"Environment(rewards=...): two of {', '.join(names)} have one name; rename one")
        if agent is not None and not inspect.iscoroutinefunction(agent):
            raise UserError(
                f"Environment(agent=...): {agent!r} is no async function; write async def agent(task, chat)"
            )
        self.agent = agent
        self.toolbox = Toolbox(tools)
        self.tools = list(self.toolbox.tools.values())
        self.rewards, self.system = list(rewards), system

    def first_messages(self, task: Task) -> list[dict[str, Any]]:
        """The system prompt, unless the task has its own, and the task."""
        messages = task.messages()
        if self.system and messages[0]["role"] != "system":
            return [{"role": "system", "content": self.system}, *messages]
        return messages


def load_environment(spec: str, base: Path = Path()) -> Environment:
    """The Environment that FILE.py:NAME names; FILE is relative to `base`. Raises UserError."""
    found = load_object(str(base / spec), "environment.path")
    if not isinstance(found, Environment):
        raise UserError(f"environment.path = {spec!r} is of type {type(found).__name__}; it must be an Environment")
    return found
