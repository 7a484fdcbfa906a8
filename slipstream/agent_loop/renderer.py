"""Messages to tokens and back, for the generic case: any chat template that only ever appends.

Invariant: `start(...) + sampled + extend(...)` is a prefix of every later prompt of the same conversation. That is
proved for a template when its renderer is made; a template that rewrites what it rendered before is refused.

Text of a user or a tool that looks like a control token stays text: contents that contain one are encoded apart.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.agent_loop.calls import Parsed, parse_hermes
from slipstream.errors import UserError
from slipstream.tools import Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]


class Renderer(Protocol):
    stop_token_ids: list[int]

    def start(self, messages: Messages, tools: Sequence[Tool]) -> list[int]:
        """The first prompt, generation prompt included."""
        ...

    def extend(self, stream: Sequence[int], messages: Messages, tools: Sequence[Tool]) -> list[int]:
        """What follows a sampled turn that ends `stream`: glue, the new messages, the generation prompt."""
        ...

    def parse(self, sampled: Sequence[int], tools: Sequence[Tool]) -> Parsed:
        """A sampled turn as content and tool calls."""
        ...

    def encode(self, text: str) -> list[int]:
        """Plain text as token ids, control tokens in it included as such."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def cut(self, text: str, tokens: int) -> str:
        """`text`, or its first `tokens` tokens and a note that it was cut."""
        ...


def create_renderer(model: str) -> Renderer:
    """The renderer for a model folder. Raises UserError when its template is missing or not prefix-stable.

    Families that the `renderers` package knows are recognized by the folder's name (`Qwen3-8B`); the generic bridge
    serves the rest.
    """
    tokenizer = load_tokenizer(model)
    from slipstream.agent_loop.family import family_of

    family = family_of(Path(model).name)
    if family:
        from slipstream.agent_loop.family import FamilyRenderer

        return FamilyRenderer(tokenizer, family)
    return TemplateRenderer(tokenizer)


def load_tokenizer(model: str) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    if not (Path(model) / "tokenizer_config.json").is_file():
        raise UserError(f"model.path = {model!r}: there is no tokenizer_config.json; name a Hugging Face model folder")
    tokenizer = AutoTokenizer.from_pretrained(model)
    if not tokenizer.chat_template:
        raise UserError(f"model.path = {model!r}: its tokenizer has no chat template; add chat_template.jinja to it")
    return tokenizer


class Text:
    """Encoding and decoding that every renderer shares."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        from tokenizers import Tokenizer

        self.tokenizer = tokenizer
        self._core = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        # The same vocabulary without its control tokens, which text can then never become.
        self._plain = Tokenizer.from_str(without_added_tokens(tokenizer.backend_tokenizer.to_str()))
        added = sorted((str(token) for token in tokenizer.get_added_vocab()), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, added)) or r"(?!)")

    def encode(self, text: str) -> list[int]:
        return self._core.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._core.decode(list(token_ids), skip_special_tokens=False)

    def cut(self, text: str, tokens: int) -> str:
        # A token is at least one character long in what it adds, so that a flood is not encoded as a whole.
        encoded = self._plain.encode(text[: 16 * tokens], add_special_tokens=False)
        if len(encoded.ids) <= tokens and len(text) <= 16 * tokens:
            return text
        end = encoded.offsets[min(tokens, len(encoded.ids)) - 1][1]
        return f"{text[:end]}... [cut: {len(text)} characters, shown are {end}]"

    def forges(self, text: str) -> bool:
        """Whether text would turn into control tokens if it were encoded with the template around it."""
        return self._control.search(text) is not None

    def encode_around(self, rendered: str, contents: dict[str, str]) -> list[int]:
        """Encode a rendered template in which each content stands as its key; contents never become control tokens."""
        ids: list[int] = []
        for piece in re.split("(" + "|".join(map(re.escape, contents)) + ")", rendered) if contents else [rendered]:
            if piece in contents:
                ids.extend(self._plain.encode(contents[piece], add_special_tokens=False).ids)
            elif piece:
                ids.extend(self.encode(piece))
        return ids

    def fence(self, messages: Messages) -> tuple[Messages, dict[str, str]]:
        """Messages in which every content that forges control tokens is replaced by a key, and the keys' contents."""
        fenced, contents = [dict(message) for message in messages], dict[str, str]()
        for index, message in enumerate(fenced):
            content = message.get("content")
            if message["role"] != "assistant" and isinstance(content, str) and self.forges(content):
                key = f"CONTENT-OF-MESSAGE-{index}-ENDS"
                contents[key] = content
                message["content"] = key
        return fenced, contents


def without_added_tokens(tokenizer_json: str) -> str:
    import json

    description = json.loads(tokenizer_json)
    description["added_tokens"] = []
    description["post_processor"] = None
    return json.dumps(description)


class TemplateRenderer(Text):
    """The generic bridge over a Hugging Face chat template, with Hermes-style tool calls (`<tool_call>` JSON)."""

    # A turn that no template has a reason to touch; what comes after it is the glue.
    _TURN = "Sure."

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        super().__init__(tokenizer)
        self._prove_prefix_stable()
        before = self._render(self._context())
        self._closing = before[before.rindex(self._TURN) + len(self._TURN) :]
        stop = self.encode(self._closing)[:1]
        if not stop or not self.forges(self.decode(stop)):
            raise UserError(
                f"chat template of {tokenizer.name_or_path!r} ends an assistant turn with {self._closing!r}, which is no "
                "special token: sampling could not stop there; end the turn with one"
            )
        self.stop_token_ids = stop
        self._stop_text = self.decode(stop)

    def start(self, messages: Messages, tools: Sequence[Tool]) -> list[int]:
        fenced, contents = self.fence(messages)
        return self.encode_around(self._render(fenced, tools, generate=True), contents)

    def extend(self, stream: Sequence[int], messages: Messages, tools: Sequence[Tool]) -> list[int]:
        fenced, contents = self.fence(messages)
        before = self._render(self._context(), tools)
        whole = self._render([*self._context(), *fenced], tools, generate=True)
        glue = whole[len(before) - len(self._closing) :]
        if stream[-1] in self.stop_token_ids:  # sampled; the template's own is not needed
            glue = glue[len(self._stop_text) :]
        return self.encode_around(glue, contents)

    def parse(self, sampled: Sequence[int], tools: Sequence[Tool]) -> Parsed:
        ids = list(sampled)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return parse_hermes(self.decode(ids))

    def _context(self) -> Messages:
        return [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": self._TURN}]

    def _render(self, messages: Messages, tools: Sequence[Tool] = (), *, generate: bool = False) -> str:
        schemas = [{"type": "function", "function": each.schema} for each in tools]
        try:
            return self.tokenizer.apply_chat_template(  # pyright: ignore[reportReturnType]
                messages, tools=schemas or None, add_generation_prompt=generate, tokenize=False
            )
        except Exception as error:  # jinja's own kinds, and whatever the template raises
            raise UserError(
                f"chat template of {self.tokenizer.name_or_path!r} cannot render roles "
                f"{[message['role'] for message in messages]}: {error}"
            ) from error

    def _prove_prefix_stable(self) -> None:
        """Render a conversation with thinking and tool results turn by turn: each must start with the one before."""
        call = {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
        conversation: Messages = [
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "content": "<think>\nWell.\n</think>\n\nYes.", "tool_calls": [call]},
            {"role": "tool", "name": "look", "content": "nothing"},
            {"role": "assistant", "content": "<think>\nSo.\n</think>\n\nNo."},
            {"role": "user", "content": "Go on."},
            {"role": "assistant", "content": self._TURN},
        ]
        for turns in range(1, len(conversation)):
            generate = conversation[turns]["role"] == "assistant"
            shorter = self.encode(self._render(conversation[:turns], generate=generate))
            longer = self.encode(self._render(conversation[: turns + 1]))
            if longer[: len(shorter)] != shorter:
                at = next(i for i, ids in enumerate(zip(shorter, longer, strict=False)) if ids[0] != ids[1])
                raise UserError(
                    f"chat template of {self.tokenizer.name_or_path!r} is not prefix-stable: with message {turns + 1} "
                    f"({conversation[turns]['role']}) token {at} turns from {self.decode([shorter[at]])!r} into "
                    f"{self.decode([longer[at]])!r}; use a template that only appends (keeps thinking in past turns)"
                )
