"""What an agent of one's own talks through: `async def agent(task, chat)`, named by `Environment(agent=...)`.

Invariant: the conversation only grows, so what it samples is one stream, and each sampled token is trained on once.
"""

import asyncio
import contextlib
import copy
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from slipstream.agent_loop.calls import ToolCall
from slipstream.agent_loop.ended import Ended
from slipstream.agent_loop.sampler import Finish
from slipstream.agent_loop.text import Messages
from slipstream.task import Task
from slipstream.trajectory import Outcome

if TYPE_CHECKING:
    from slipstream.agent_loop.loop import AgentLoop, Episode


class Said(msgspec.Struct, frozen=True):
    """One turn of the model. `cut`: a budget ended it before the model did; its calls are not to be run."""

    text: str
    calls: list[ToolCall]
    cut: bool


class Chat(Protocol):
    @property
    def messages(self) -> Messages:
        """The conversation so far."""
        ...

    async def say(self) -> Said:
        """One turn of the model. The first one answers the task. Ends the trajectory when no budget is left."""
        ...

    async def run(self, calls: Sequence[ToolCall]) -> list[str]:
        """Run tool calls, side by side, and show the model their results; these are returned too."""
        ...

    def tell(self, text: str) -> None:
        """Say something to the model as its user."""
        ...


Agent = Callable[[Task, Chat], Awaitable[None]]


class Conversation:
    """The Chat over an episode of the agent loop."""

    def __init__(self, loop: "AgentLoop", episode: "Episode") -> None:
        self._loop, self._episode = loop, episode
        self._models_turn = True  # whether it is for the model to speak
        self._cut = False
        self._ended: Ended | None = None

    async def hold(self, agent: Agent) -> Outcome:
        """Let the agent talk. An Ended that it swallows still ends the trajectory."""
        await agent(self._episode.task, self)
        if self._ended is not None:
            raise self._ended
        if not self._episode.turn:
            raise Ended(Outcome.INVALID, "the agent returned before the model had said anything")
        return Outcome.TRUNCATED_TOKENS if self._cut else Outcome.FINISHED

    @property
    def messages(self) -> Messages:
        return copy.deepcopy(self._episode.messages)

    async def say(self) -> Said:
        if not self._models_turn:
            raise RuntimeError("say() after say(): run() its calls or tell() it something first")
        async with self._ending():
            if self._episode.turn >= self._loop.limits.max_turns:
                raise Ended(Outcome.TRUNCATED_TURNS)
            if self._cut or self._loop.room(self._episode) <= 0:
                raise Ended(Outcome.TRUNCATED_TOKENS)
            finish, calls = await self._loop.say(self._episode)
            self._models_turn, self._cut = False, finish is Finish.LENGTH
        return Said(self._episode.answer, calls, self._cut)

    async def run(self, calls: Sequence[ToolCall]) -> list[str]:
        self._after_the_model("run()")
        async with self._ending():
            await self._loop.answer_calls(self._episode, list(calls))
            self._models_turn = True
        return [str(message["content"]) for message in self._episode.messages[-len(calls) :]] if calls else []

    def tell(self, text: str) -> None:
        self._after_the_model("tell()")
        try:
            self._loop.tell(self._episode, text)
        except Ended as ended:
            self._ended = ended
            raise
        self._models_turn = True

    def _after_the_model(self, what: str) -> None:
        if self._models_turn:
            raise RuntimeError(f"{what} where it is for the model to speak: say() first")

    @contextlib.asynccontextmanager
    async def _ending(self) -> AsyncGenerator[None]:
        if self._ended is not None:
            await asyncio.sleep(0)  # an agent that tries for ever leaves room for others, and for its deadline
            raise self._ended
        try:
            yield
        except Ended as ended:
            self._ended = ended
            raise
