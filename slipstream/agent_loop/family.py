"""Model families whose message format the `renderers` package knows by heart (Prime Intellect, Apache-2.0).

Invariant: the package never re-renders a sampled token: a bridge that does not start with the stream is refused.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.agent_loop.calls import MOST_CALLS, Parsed, ToolCall
from slipstream.agent_loop.renderer import Messages, Text
from slipstream.errors import UserError
from slipstream.tools import Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def family_of(folder: str) -> str:
    """The family of a model folder named like the model on the hub ('Qwen3-8B' -> 'qwen3'), or ''."""
    from renderers.base import MODEL_RENDERER_MAP

    return next((family for name, family in MODEL_RENDERER_MAP.items() if name.rpartition("/")[2] == folder), "")


class FamilyRenderer(Text):
    def __init__(self, tokenizer: "PreTrainedTokenizerBase", family: str) -> None:
        from renderers import config_from_name, create_renderer

        super().__init__(tokenizer)
        self._inner: Any = create_renderer(tokenizer, config_from_name(family))
        self.stop_token_ids: list[int] = list(self._inner.get_stop_token_ids())

    def start(self, messages: Messages, tools: Sequence[Tool]) -> list[int]:
        return list(self._inner.render_ids(messages, tools=_specs(tools), add_generation_prompt=True))

    def extend(self, stream: Sequence[int], messages: Messages, tools: Sequence[Tool]) -> list[int]:
        before = list(stream)
        bridged = self._inner.bridge_to_next_turn(before, [], messages, tools=_specs(tools))
        if bridged is None or list(bridged.token_ids[: len(before)]) != before:
            raise UserError(f"the renderer of {self.tokenizer.name_or_path!r} cannot append to a sampled turn")
        return list(bridged.token_ids[len(before) :])

    def parse(self, sampled: Sequence[int], tools: Sequence[Tool]) -> Parsed:
        response = self._inner.parse_response(list(sampled), tools=_specs(tools))
        calls = [_call(attempt) for attempt in response.tool_calls]
        if len(calls) > MOST_CALLS:
            over = ToolCall("", "{}", f"{len(calls)} calls in one turn; the first {MOST_CALLS} were run")
            calls = [*calls[:MOST_CALLS], over]
        return Parsed(response.content or "", calls)


def _specs(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    return [each.schema for each in tools] or None


def _call(attempt: Any) -> ToolCall:
    if attempt.status != "ok":
        return ToolCall(attempt.name or "", "{}", f"the call could not be read ({attempt.status}): {attempt.raw[:200]}")
    arguments = attempt.arguments
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments or {}).decode()
    if not text.lstrip().startswith("{"):
        return ToolCall(attempt.name, "{}", "arguments must be a JSON object, such as {}")
    return ToolCall(attempt.name, text)
