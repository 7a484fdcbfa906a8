"""How far an unfinished trajectory has come, as a Trajectory: what another process needs to go on with it.

Invariant: what goes on has every token, log-prob and version that was there, the messages, and the state of the tools;
where a tool's state cannot be had, nothing is parked. Parked is between two turns, after the tools have answered, and
where the loop itself leads the one conversation there is.
"""

import time
from collections.abc import Sequence

import msgspec

from slipstream.agent_loop.episode import Branch, Episode
from slipstream.agent_loop.stream import TokenStream
from slipstream.agent_loop.text import Messages
from slipstream.tools import Tool, ToolFailed
from slipstream.trajectory import Trajectory


class CannotGoOn(Exception):
    """Says why; the trajectory is to be made from its beginning."""


class Unfinished(msgspec.Struct):
    """What a Trajectory has no column for; in its `detail`, as JSON."""

    messages: Messages
    answer: str
    seconds: float  # that it took so far, of rollout.max_seconds
    tools: dict[str, bytes]  # the state of each ToolSet that was made, by its class's name


def detail(episode: Episode, tools: dict[str, bytes]) -> bytes | None:
    """None where a task's messages are none that JSON can hold."""
    seconds = time.monotonic() - episode.began
    try:
        return msgspec.json.encode(Unfinished(episode.messages, episode.answer, seconds, tools))
    except (ValueError, OverflowError, RecursionError, TypeError):
        return None


async def go_on(episode: Episode, parked: Trajectory, tools: Sequence[Tool]) -> None:
    """Bring an episode that has not begun to where another one was. Raises CannotGoOn."""
    try:
        state = msgspec.json.decode(parked.detail or b"", type=Unfinished)
    except msgspec.DecodeError as error:
        raise CannotGoOn(f"what was parked cannot be read: {error}") from error
    try:
        await episode.tools.restore(state.tools)
    except ToolFailed as error:
        raise CannotGoOn(str(error)) from error
    branch = Branch(episode, tools, [])
    branch.add(state.messages)
    branch.stream = _stream_of(parked)
    episode.answer = state.answer
    episode.began -= state.seconds
    episode.deadline -= state.seconds
    episode.turn, episode.tool_calls, episode.tool_errors = parked.turns, parked.tool_calls, parked.tool_errors
    episode.t_first_token = parked.t_first_token
    episode.s_generate, episode.s_tool = parked.s_generate, parked.s_tool


def _stream_of(parked: Trajectory) -> TokenStream:
    stream = TokenStream()
    stream.token_ids, stream.logprobs = parked.token_ids, parked.logprobs
    stream.sampled, stream.sampled_count = parked.sampled, sum(parked.sampled)
    stream.version_runs, stream.spans = parked.version_runs, parked.spans
    return stream
