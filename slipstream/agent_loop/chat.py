"""What an agent of one's own talks through: `async def agent(task, chat)`, named by `Environment(agent=...)`.

Invariant: a conversation only grows, and one that begins anew is a branch of the same trajectory: whatever the agent
does, each sampled token is trained on once, with the trajectory's one advantage.
"""

import asyncio
import contextlib
import copy
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from slipstream.agent_loop.calls import ToolCall
from slipstream.agent_loop.ended import ContextFull, Ended
from slipstream.agent_loop.episode import Branch, Episode
from slipstream.agent_loop.sampler import Finish
from slipstream.agent_loop.text import Messages
from slipstream.task import Task
from slipstream.tools import Shown
from slipstream.trajectory import Outcome, SpanKind

if TYPE_CHECKING:
    from slipstream.agent_loop.loop import AgentLoop


class Said(msgspec.Struct, frozen=True):
    """One turn of the model. `cut`: a budget ended it before the model did; its calls are not to be run."""

    text: str
    calls: list[ToolCall]
    cut: bool


class Endpoint(msgspec.Struct, frozen=True):
    """Base URLs for clients, which may be in another process of this machine."""

    openai: str  # chat completions and responses
    anthropic: str  # messages
    key: str  # stands in both URLs; as an API key it does as well, where only http://HOST:PORT[/v1] is given


class Chat(Protocol):
    """One conversation. When a budget of the trajectory is out, `say` ends it; when only this conversation has no room
    left, `say`, `run` and `tell` raise ContextFull, and another branch may go on."""

    @property
    def messages(self) -> Messages:
        """The conversation so far: a copy."""
        ...

    @property
    def room(self) -> int:
        """Tokens that the next turn may have, by the trajectory's budget and this conversation's length."""
        ...

    async def say(self) -> Said:
        """One turn of the model. The first one answers the task."""
        ...

    async def run(self, calls: Sequence[ToolCall]) -> list[str]:
        """Run tool calls, side by side, and show the model their results; these are returned too."""
        ...

    def tell(self, text: str) -> None:
        """Say something to the model as its user."""
        ...

    def branch(self, messages: Messages | None = None, tools: Sequence[str] | None = None) -> "Chat":
        """Another conversation of the same trajectory: one that begins as this one stands, or with these messages.

        `tools`: names of those that it may call, where these are not all; only with messages. Both conversations can
        go on, also at the same time.
        """
        ...

    async def serve(self) -> Endpoint:
        """Addresses at which any OpenAI or Anthropic client speaks with this trajectory's model, until the agent
        returns. Its conversations are branches beside this one."""
        ...


Agent = Callable[[Task, Chat], Awaitable[str | None]]


async def lead(loop: "AgentLoop", branch: Branch, agent: Agent) -> Outcome:
    """Let the agent talk. An Ended that it swallows, or wraps, still ends the trajectory."""
    episode = branch.episode
    try:
        answer = await agent(episode.task, Conversation(loop, branch))
    except Exception as error:
        raise episode.ended or _alone(error) from error
    finally:  # what it left running says nothing more
        for close in episode.on_end:
            close()
        over, episode.ended = episode.ended, episode.ended or Ended(Outcome.CANCELLED, "the agent returned")
    if over is not None:
        raise over
    if not episode.turn:
        raise Ended(Outcome.INVALID, "the agent returned before the model had said anything")
    if isinstance(answer, str):
        episode.answer = answer
    elif answer is not None:
        kind = type(answer).__name__
        raise Ended(Outcome.INVALID, f"the agent returned {kind}; return the answer as text, or nothing")
    return Outcome.TRUNCATED_TOKENS if episode.cut else Outcome.FINISHED


def begun(loop: "AgentLoop", episode: Episode, messages: Messages, tools: Sequence[Shown]) -> Branch:
    """Another branch, unless the trajectory has ended. Raises ContextFull where it has no room for these messages."""
    if episode.ended is not None:
        raise episode.ended
    try:
        return loop.branch(episode, messages, tools)
    except ContextFull:
        episode.cut = True
        raise


def may_speak(loop: "AgentLoop", branch: Branch) -> None:
    """Raises Ended where a budget is out, ContextFull where the branch has no room."""
    if branch.episode.asked >= loop.limits.max_turns:
        raise Ended(Outcome.TRUNCATED_TURNS, f"all {loop.limits.max_turns} turns are taken (rollout.max_turns)")
    if loop.budget(branch.episode) <= 0:
        raise Ended(Outcome.TRUNCATED_TOKENS, f"all {loop.limits.max_tokens} tokens are spent (rollout.max_tokens)")
    if loop.room(branch) <= 0:
        raise ContextFull(f"the conversation has {len(branch.stream)} tokens (engine.max_model_len)")


def _alone(error: Exception) -> Exception:
    """Of a group (branches that talk side by side) in which conversations had no room and nothing else went wrong,
    the first."""
    if isinstance(error, ExceptionGroup) and error.split(ContextFull)[1] is None:
        return _alone(error.exceptions[0])
    return error


class Conversation:
    """The Chat over a branch."""

    def __init__(self, loop: "AgentLoop", branch: Branch, *, models_turn: bool = True) -> None:
        self._loop, self._branch = loop, branch
        self._models_turn = models_turn  # whether it is for the model to speak
        self._speaking = False
        self._full: ContextFull | None = None

    @property
    def messages(self) -> Messages:
        return copy.deepcopy(self._branch.messages)

    @property
    def room(self) -> int:
        return 0 if self._full is not None else max(0, self._loop.room(self._branch))

    async def say(self) -> Said:
        episode = self._branch.episode
        async with self._ending():
            self._not_while_speaking("say()")
            if not self._models_turn:
                raise RuntimeError("say() after say(): run() its calls or tell() it something first")
            may_speak(self._loop, self._branch)
            self._speaking = True
            try:
                finish, calls = await self._loop.say(self._branch)
            finally:
                self._speaking = False
            self._models_turn, episode.cut = False, finish is Finish.LENGTH
        return Said(str(self._branch.messages[-1]["content"]), calls, episode.cut)

    async def run(self, calls: Sequence[ToolCall]) -> list[str]:
        async with self._ending():
            self._after_the_model("run()")
            await self._loop.answer_calls(self._branch, list(calls))
            self._models_turn = True
        return [str(message["content"]) for message in self._branch.messages[-len(calls) :]] if calls else []

    def tell(self, text: str) -> None:
        with self._ends():
            self._after_the_model("tell()")
            self._loop.append(self._branch, [{"role": "user", "content": text}], SpanKind.PROMPT)
        self._models_turn = True

    def branch(self, messages: Messages | None = None, tools: Sequence[str] | None = None) -> "Conversation":
        episode = self._branch.episode
        if messages is not None:
            return Conversation(self._loop, begun(self._loop, episode, copy.deepcopy(messages), self._named(tools)))
        if tools is not None:
            raise ValueError("branch(tools=...) without messages: a prompt that stands shows the tools it shows")
        with self._ends():
            self._not_while_speaking("branch()")
            return Conversation(self._loop, self._branch.fork(), models_turn=self._models_turn)

    async def serve(self) -> Endpoint:
        episode = self._branch.episode
        if episode.ended is not None:
            raise episode.ended
        endpoint, close = self._loop.door().admit(episode)
        episode.on_end.append(close)
        return endpoint

    def _named(self, names: Sequence[str] | None) -> list[Shown]:
        if names is None:
            return self._branch.tools
        known = {each.name: each for each in self._loop.environment.tools}
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"branch(tools=...): there is no {unknown[0]}; there are: {', '.join(known)}")
        return [known[name] for name in names]

    def _after_the_model(self, what: str) -> None:
        self._not_while_speaking(what)
        if self._models_turn:
            raise RuntimeError(f"{what} where it is for the model to speak: say() first")

    def _not_while_speaking(self, what: str) -> None:
        if self._speaking:
            raise RuntimeError(f"{what} while the model speaks here: await say(), or branch() before it")

    @contextlib.asynccontextmanager
    async def _ending(self) -> AsyncGenerator[None]:
        if self._branch.episode.ended is not None or self._full is not None:
            await asyncio.sleep(0)  # an agent that tries for ever leaves room for others, and for its deadline
        with self._ends():
            yield

    @contextlib.contextmanager
    def _ends(self) -> Generator[None]:
        episode = self._branch.episode
        if over := episode.ended or self._full:
            raise over
        try:
            yield
        except ContextFull as full:
            self._full, episode.cut = full, True
            raise
        except Ended as ended:
            episode.ended = ended
            raise
