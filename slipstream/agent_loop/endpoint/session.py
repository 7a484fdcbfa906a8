"""One trajectory as an API's server sees it: whole conversations come in, each is laid on the branch it continues.

Invariant: the engine is asked with the tokens of a branch and nothing else. A request whose messages begin as an
earlier one's did, with the model's answer to it, goes on with the very tokens that were sampled: on that branch, or on
a fork of it where the branch went on already. Any other request begins a branch.
"""

import asyncio
import hashlib
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from slipstream.agent_loop.chat import begun, may_speak
from slipstream.agent_loop.ended import ContextFull, Ended
from slipstream.agent_loop.endpoint.asked import Asked, CallMade, Refused, Reply, assistant, is_object, name_results
from slipstream.agent_loop.episode import Branch, Episode
from slipstream.agent_loop.sampler import Finish
from slipstream.agent_loop.text import Messages
from slipstream.errors import UserError
from slipstream.trajectory import Outcome, SpanKind

if TYPE_CHECKING:
    from slipstream.agent_loop.loop import AgentLoop

GONE = "no trajectory has this key, or it has ended"
AFTER_A_TURN = frozenset({"user", "tool"})  # roles that a branch can be continued with


class _Place(NamedTuple):
    """The end of a turn of the model."""

    branch: Branch
    tokens: int
    messages: int


class Session:
    def __init__(self, loop: "AgentLoop", episode: Episode) -> None:
        self._loop, self._episode = loop, episode
        self._places: dict[bytes, _Place] = {}  # by the digest of tools and messages up to there
        self._histories: dict[str, Messages] = {}
        self._going: set[asyncio.Task[Reply]] = set()

    def close(self) -> None:
        for task in self._going:
            task.cancel()

    def remembered(self, identity: str) -> Messages:
        """The conversation that ended with this answer."""
        if identity not in self._histories:
            raise Refused(404, f"there is no answer {identity!r} in this trajectory", "previous_response_not_found")
        return self._histories[identity]

    def remember(self, identity: str, asked: Asked, reply: Reply) -> None:
        said = [message for message in asked.messages if message["role"] != "system"]
        self._histories[identity] = [*said, assistant(reply.text, reply.calls)]

    def start(self, asked: Asked) -> "asyncio.Task[Reply]":
        """The model's turn. It raises Refused; cancelled, it samples no more."""
        name_results(asked.messages)
        task = asyncio.ensure_future(self._complete(asked))
        self._going.add(task)
        task.add_done_callback(self._going.discard)
        return task

    async def _complete(self, asked: Asked) -> Reply:
        episode = self._episode
        if episode.ended is not None:
            raise Refused(403, f"the trajectory has ended: {episode.ended.outcome.value}; {episode.ended.why}")
        try:
            digests = _digests(asked)
            branch = self._branch(asked, digests)
            may_speak(self._loop, branch)
            prompt = len(branch.stream)
            number = episode.asked
            finish, made = await self._loop.say(branch, asked.most)
        except ContextFull as full:
            episode.cut = True
            raise Refused(400, f"the prompt is too long: {full.why}", "context_length_exceeded") from full
        except Ended as ended:
            episode.ended = ended
            status = 500 if ended.outcome in (Outcome.ENGINE_FAILED, Outcome.CANCELLED) else 403
            raise Refused(status, f"the trajectory has ended: {ended.outcome.value}; {ended.why}") from ended
        except UserError as error:
            raise Refused(400, str(error)) from error
        episode.cut = finish is Finish.LENGTH
        ids = branch.stream.token_ids[prompt:]
        text = str(branch.messages[-1]["content"])
        calls = [
            CallMade(call.id or f"call_{number}_{place}", call.name, call.arguments)
            for place, call in enumerate(made)
            if not call.problem and not episode.cut and is_object(call.arguments)
        ]
        if len(calls) < len(made):  # what cannot be read as a call, the agent reads as it was said
            said = list(ids[:-1]) if ids and ids[-1] in self._loop.renderer.stop_token_ids else list(ids)
            text = self._loop.renderer.decode(said)
        self._places[_digest(digests[-1], assistant(text, calls))] = _Place(
            branch, len(branch.stream), len(branch.messages)
        )
        return Reply(
            number=number,
            text=text,
            calls=calls,
            cut=episode.cut,
            prompt_tokens=prompt,
            sampled_tokens=len(ids),
            created=int(time.time()),
        )

    def _branch(self, asked: Asked, digests: list[bytes]) -> Branch:
        """With these messages as its prompt."""
        for count in range(len(asked.messages) - 1, 0, -1):
            if asked.messages[count]["role"] not in AFTER_A_TURN:
                break
            if (place := self._places.get(digests[count - 1])) is not None:
                return self._continued(place, asked.messages[count:])
        return begun(self._loop, self._episode, asked.messages, asked.tools)

    def _continued(self, place: _Place, new: Messages) -> Branch:
        branch = place.branch
        if (len(branch.stream), len(branch.messages)) != (place.tokens, place.messages):
            branch = branch.fork(place.tokens, place.messages)
        results = sum(message["role"] == "tool" for message in new)
        self._episode.tool_calls += results
        self._loop.append(branch, new, SpanKind.TOOL if results else SpanKind.PROMPT)
        return branch


def _digests(asked: Asked) -> list[bytes]:
    """Of the tools with the messages up to each."""
    digest = hashlib.blake2b(msgspec.json.encode([tool.schema for tool in asked.tools])).digest()
    found: list[bytes] = []
    for message in asked.messages:
        digest = _digest(digest, message)
        found.append(digest)
    return found


def _digest(before: bytes, message: dict[str, object]) -> bytes:
    """Clients write the arguments of a call anew, and number calls as they like: neither is another conversation."""
    content = message["content"]
    calls: list[tuple[str, object]] = []
    for call in message.get("tool_calls") or []:  # pyright: ignore[reportGeneralTypeIssues]
        function = call["function"]
        calls.append((function["name"], msgspec.json.decode(function["arguments"])))
    told = [message["role"], content.strip() if isinstance(content, str) else content, calls]
    return hashlib.blake2b(before + msgspec.json.encode(told, order="sorted")).digest()
