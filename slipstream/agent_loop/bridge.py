"""The generic bridge: any chat template that only ever appends, with tool calls in the format that it writes.

Invariant: `start(...) + sampled turn + extend(...)` are the tokens that the template itself would render. That is
proved for a template when its renderer is made; one that rewrites what it rendered before is refused.
"""

from collections.abc import Sequence
from typing import Any

from slipstream.agent_loop.calls import Parsed, parse_turn
from slipstream.agent_loop.formats import HERMES, detect
from slipstream.agent_loop.text import HuggingFaceTokenizer, Messages, Text, envelope, with_objects
from slipstream.errors import UserError
from slipstream.tools import Shown, tool

SAID = "Sure."  # a turn that no template has a reason to touch; what comes after it is the glue
CONTEXT: Messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": SAID}]


@tool
def look(at: str) -> str:
    """Look at something."""
    return at


def _look(at: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "arguments": {"at": at}}}


CONVERSATION: Messages = [
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": "<think>\nWell.\n</think>\n\nYes."},
    {"role": "user", "content": "Go on."},
    {"role": "assistant", "content": "<think>\nSo.\n</think>\n\nNo."},
]
CONVERSATION_WITH_TOOLS: Messages = [
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": "Yes.", "tool_calls": [_look("it"), _look("that")]},
    {"role": "tool", "name": "look", "content": "something"},
    {"role": "tool", "name": "look", "content": "nothing"},
    {"role": "assistant", "content": "No.", "tool_calls": [_look("this")]},
    {"role": "tool", "name": "look", "content": "all"},
    {"role": "assistant", "content": "Done."},
]


class BridgeRenderer(Text):
    """Renders new messages after a minimal context of its own, and takes what is new."""

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        super().__init__(tokenizer)
        self._template = tokenizer
        self._no_tools = ""  # why this template cannot have tools
        self._format = HERMES
        self.stop_token_ids = self._stop_tokens()
        self._opens_thought = self._render(CONTEXT[:1], generate=True).rstrip().endswith("<think>")
        self._prove(CONVERSATION, [])
        try:
            if "look" not in self._render(CONTEXT[:1], [look]):
                raise UserError(f"chat template of {self.name!r} does not show tools to the model")
            self._prove(CONVERSATION_WITH_TOOLS, [look])
            before, after = (self._render(CONVERSATION_WITH_TOOLS[:count], [look]) for count in (1, 2))
            self._format = detect(after.removeprefix(before))
        except UserError as error:
            self._no_tools = str(error)

    def start(self, messages: Messages, tools: Sequence[Shown]) -> list[int]:
        if tools and self._no_tools:
            raise UserError(self._no_tools)
        fenced, contents = self.fence(with_objects(messages))
        return self.encode_around(self._render(fenced, tools, generate=True), contents)

    def extend(self, stream: Sequence[int], messages: Messages, tools: Sequence[Shown]) -> list[int]:
        fenced, contents = self.fence(messages)
        before = self._render(CONTEXT, tools)
        said = before[: before.rindex(SAID) + len(SAID)]
        whole = self._render([*CONTEXT, *fenced], tools, generate=True)
        if not whole.startswith(said):
            raise self._unstable(self.encode(said), self.encode(whole), len(CONTEXT))
        glue = self.encode_around(whole[len(said) :], contents)  # begins with the template's end of turn
        return glue[1:] if stream[-1] == glue[0] else glue

    def parse(self, sampled: Sequence[int], tools: Sequence[Shown]) -> Parsed:
        ids = list(sampled)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return parse_turn(self.decode(ids), self._format, tools, opened=self._opens_thought)

    def _stop_tokens(self) -> list[int]:
        before = self._render(CONTEXT)
        closing = before[before.rindex(SAID) + len(SAID) :]
        stop = self.encode(closing)[:1]
        if not stop or not self.is_control(stop[0]):
            raise UserError(
                f"chat template of {self.name!r} ends an assistant turn with {closing!r}, which is no special token: "
                "sampling could not stop there; end the turn with one"
            )
        end_of_text: int | None = self._template.eos_token_id
        return stop if end_of_text is None or end_of_text in stop else [*stop, end_of_text]

    def _render(self, messages: Messages, tools: Sequence[Shown] = (), *, generate: bool = False) -> str:
        schemas = [envelope(each) for each in tools]
        try:
            return str(
                self._template.apply_chat_template(
                    messages, tools=schemas or None, add_generation_prompt=generate, tokenize=False
                )
            )
        except Exception as error:  # jinja's own kinds, and whatever the template raises
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(f"chat template of {self.name!r} cannot render the roles {roles}: {error}") from error

    def _prove(self, conversation: Messages, tools: Sequence[Shown]) -> None:
        """Build the conversation by start and extend, and compare with the template's own at every turn."""
        turns = [at for at, message in enumerate(conversation) if message["role"] == "assistant"]
        stream = self.encode(self._render(conversation[: turns[0]], tools, generate=True))
        for turn, after in zip(turns, [*turns[1:], None], strict=True):
            whole = self.encode(self._render(conversation[: turn + 1], tools))
            self._same(stream, whole[: len(stream)], turn)
            end = len(whole) - 1 - whole[::-1].index(self.stop_token_ids[0])
            stream = whole[: end + 1]
            if after is not None:
                stream = stream + self.extend(stream, conversation[turn + 1 : after], tools)
                self._same(self.encode(self._render(conversation[:after], tools, generate=True)), stream, after)

    def _same(self, expected: list[int], got: list[int], message: int) -> None:
        if expected != got:
            raise self._unstable(expected, got, message)

    def _unstable(self, expected: list[int], got: list[int], message: int) -> UserError:
        pairs = zip(expected, got, strict=False)
        at = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(expected), len(got)))
        one, other = self.decode(expected[at : at + 1]), self.decode(got[at : at + 1])
        return UserError(
            f"chat template of {self.name!r} is not prefix-stable: rendering message {message + 1} changes token {at}, "
            f"{one!r} against {other!r}; use a template that only appends (and keeps the thinking of past turns)"
        )
