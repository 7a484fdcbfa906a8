"""Messages to tokens and back: what the agent loop asks of a model's chat format.

Invariant: the next prompt is the stream so far with `extend(...)` appended; nothing that was sampled is rendered again.
"""

import logging
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from slipstream.agent_loop.calls import Parsed
from slipstream.agent_loop.text import HuggingFaceTokenizer, Messages
from slipstream.errors import UserError
from slipstream.tools import Shown

log = logging.getLogger(__name__)


class Renderer(Protocol):
    stop_token_ids: list[int]  # the first is the template's own end of turn

    def start(self, messages: Messages, tools: Sequence[Shown]) -> list[int]:
        """The first prompt, generation prompt included."""
        ...

    def extend(self, stream: Sequence[int], messages: Messages, tools: Sequence[Shown]) -> list[int]:
        """What follows a sampled turn that ends `stream` (with its stop token, or cut short of it): glue, the new
        messages, the generation prompt."""
        ...

    def parse(self, sampled: Sequence[int], tools: Sequence[Shown]) -> Parsed:
        """A sampled turn as content and tool calls."""
        ...

    def encode(self, text: str) -> list[int]:
        """Text as token ids, control tokens in it included as such."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def cut(self, text: str, tokens: int) -> str:
        """`text`, or its first `tokens` tokens and a note that it was cut."""
        ...


def create_renderer(model: str) -> Renderer:
    """The renderer for a model folder. Raises UserError when its template is missing or not prefix-stable.

    A family that the `renderers` package knows is recognized by the folder's name (`Qwen3-8B`) or its model type, and
    taken when it renders as the model's own template does. The generic bridge serves all other templates.
    """
    from slipstream.agent_loop.bridge import BridgeRenderer
    from slipstream.agent_loop.family import family_renderer

    tokenizer = load_tokenizer(model)
    renderer = family_renderer(tokenizer, Path(model))
    if renderer is not None:
        log.info("messages are rendered as the family %s does", renderer.family)
        return renderer
    return BridgeRenderer(tokenizer)


def load_tokenizer(model: str) -> HuggingFaceTokenizer:
    if not (Path(model) / "tokenizer_config.json").is_file():
        raise UserError(f"model.path = {model!r}: there is no tokenizer_config.json; name a Hugging Face model folder")
    auto: Any = import_module("transformers").AutoTokenizer
    try:
        tokenizer: HuggingFaceTokenizer = auto.from_pretrained(model)
    except Exception as error:  # whatever a broken file makes transformers raise
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"model.path = {model!r}: its tokenizer cannot be loaded; mend its files ({said})") from error
    if not tokenizer.chat_template:
        raise UserError(f"model.path = {model!r}: its tokenizer has no chat template; add chat_template.jinja to it")
    if not tokenizer.is_fast:
        raise UserError(f"model.path = {model!r}: its tokenizer is no fast one; add tokenizer.json to it")
    return tokenizer
