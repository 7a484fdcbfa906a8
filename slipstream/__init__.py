"""slipstream: fully asynchronous, streaming RL for tool-using language-model agents."""

from slipstream.agent_loop import AgentLoop, Environment
from slipstream.rewards import reward
from slipstream.task import Task
from slipstream.tools import tool
from slipstream.trajectory import Outcome, Trajectory

__all__ = ["AgentLoop", "Environment", "Outcome", "Task", "Trajectory", "reward", "tool"]
