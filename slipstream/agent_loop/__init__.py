"""Tokens in, tokens out: the append-only token stream, turns, budgets, outcomes, environments."""

from slipstream.agent_loop.ended import ContextFull
from slipstream.agent_loop.environment import Environment
from slipstream.agent_loop.loop import AgentLoop

__all__ = ["AgentLoop", "ContextFull", "Environment"]
