"""Text to tokens and back, in a way that text never forges what only the template may say.

Invariant: a user's or a tool's content never becomes a control token, whatever it spells; tokens that are rendered
otherwise are those of the template as a whole.
"""

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from slipstream.tools import Shown

Messages = list[dict[str, Any]]
HuggingFaceTokenizer = Any  # transformers.PreTrainedTokenizerBase, most of whose types are unknown to a checker


def envelope(tool: Shown) -> dict[str, Any]:
    """A tool as chat templates are given it."""
    return {"type": "function", "function": tool.schema}


def with_objects(messages: Messages) -> Messages:
    """The arguments of past calls as objects, not as JSON text, which many templates would encode once more."""
    return [
        {**message, "tool_calls": list(map(_read, message["tool_calls"]))} if message.get("tool_calls") else message
        for message in messages
    ]


def _read(call: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = call["function"]
    if not isinstance(function["arguments"], str):
        return call
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}


class Text:
    """What every renderer shares: a tokenizer, and the same vocabulary without its control tokens."""

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        from tokenizers import Tokenizer

        whole: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
        plain: dict[str, Any] = {**whole, "added_tokens": [], "post_processor": None}
        self.name: str = tokenizer.name_or_path
        self._tokenizer: Any = Tokenizer.from_str(json.dumps(whole))
        self._plain: Any = Tokenizer.from_str(json.dumps(plain))
        self._control_ids = frozenset[int](token["id"] for token in whole["added_tokens"])
        spelled = sorted((token["content"] for token in whole["added_tokens"]), key=len, reverse=True)
        self._control = re.compile("(" + "|".join(map(re.escape, spelled)) + ")" if spelled else r"((?!))")
        self._nonce = secrets.token_hex(8)  # stands in no user's text, and is never encoded

    def encode(self, text: str) -> list[int]:
        """Token ids of text that may hold control tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_content(self, text: str) -> list[int]:
        """Token ids of text that may not."""
        ids = list(self._plain.encode(text, add_special_tokens=False).ids)
        if self._control_ids.isdisjoint(ids):
            return ids
        # The model can also spell a control token out of its ordinary pieces: letter by letter it cannot.
        pieces = self._control.split(text)
        apart = [part for i, piece in enumerate(pieces) for part in (piece if i % 2 else [piece])]
        return [token for part in apart if part for token in self._plain.encode(part, add_special_tokens=False).ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def is_control(self, token_id: int) -> bool:
        return token_id in self._control_ids

    def cut(self, text: str, tokens: int) -> str:
        """`text`, or about its first `tokens` tokens and a note that it was cut."""
        head = text[: 16 * tokens]  # a flood is not encoded as a whole
        encoded = self._plain.encode(head, add_special_tokens=False)
        if len(encoded.ids) <= tokens and len(head) == len(text):
            return text
        end: int = encoded.offsets[min(tokens, len(encoded.ids)) - 1][1]
        return f"{text[:end]}... [cut: {len(text)} characters, shown are {end}]"

    def fence(self, messages: Messages) -> tuple[Messages, dict[str, str]]:
        """Messages in which a content that spells control tokens is replaced by a key, and the contents by key."""
        fenced, contents = [dict(message) for message in messages], dict[str, str]()
        for index, message in enumerate(fenced):
            content = message.get("content")
            if message["role"] in ("user", "tool") and isinstance(content, str) and self._control.search(content):
                key = f"content-{self._nonce}-{index}-"
                contents[key] = content
                message["content"] = key
        return fenced, contents

    def encode_around(self, rendered: str, contents: dict[str, str]) -> list[int]:
        """Encode a rendered template in which fenced contents stand as their keys."""
        if not contents:
            return self.encode(rendered)
        ids: list[int] = []
        for piece in re.split("(" + "|".join(map(re.escape, contents)) + ")", rendered):
            if piece in contents:
                ids.extend(self.encode_content(contents[piece]))
            elif piece:
                ids.extend(self.encode(piece))
        return ids
