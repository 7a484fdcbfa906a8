"""Model families whose message format the `renderers` package knows by heart (Prime Intellect, Apache-2.0).

Invariant: a family is used only where it renders a conversation with tools exactly as the model's own template does.
"""

import json
import logging
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from slipstream.agent_loop.calls import Parsed, ToolCall, bad, capped, checked, parse_turn
from slipstream.agent_loop.formats import FORMATS
from slipstream.agent_loop.text import HuggingFaceTokenizer, Messages, Text, envelope, with_objects
from slipstream.errors import UserError
from slipstream.tools import Shown, tool

log = logging.getLogger(__name__)

# Families whose calls are read here, as from any other template: so a call that is wrong is one problem, and one inside
# a thought is not run, in each of them alike. The package reads the calls of the others.
READ_HERE = {
    "qwen3": "hermes",
    "qwen3-vl": "hermes",
    "qwen3.5": "qwen3-coder",
    "qwen3.6": "qwen3-coder",
    "glm-4.5": "glm",
    "glm-5": "glm",
    "llama-3": "llama3",
    "deepseek-v3": "deepseek",
    "kimi-k2": "kimi",
    "kimi-k2.5": "kimi",
}


class FamilyRenderer(Text):
    """The package's renderer over our tokenizer, so that contents are fenced there as everywhere."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, family: str, *, enveloped: bool) -> None:
        """`enveloped`: the family shows a tool as templates are given it, not its schema alone."""
        super().__init__(tokenizer)
        self.family = family
        self._enveloped = enveloped
        self._encoder = _Encoder(self, tokenizer)
        # "all": thoughts of past turns stay; the stream only ever grows.
        renderers: Any = import_module("renderers")  # it has no types for a checker
        configs: Any = import_module("renderers.configs")
        config = type(configs.config_from_name(family))(thinking_retention="all")
        self._inner: Any = renderers.create_renderer(self._encoder, config)
        self.stop_token_ids: list[int] = list(self._inner.get_stop_token_ids())
        # A turn like the model's own, for `extend`: it ends in speech, whether or not the prompt opens a thought.
        self._prompt = self.start([{"role": "user", "content": "Hi."}], [])
        self._opens_thought = self.decode(self._prompt).rstrip().endswith("<think>")
        self._format = next((each for each in FORMATS if each.name == READ_HERE.get(family)), None)
        self._said = next((said for said in self._turns() if self._bridge(said, self.stop_token_ids[0])), None)

    def _turns(self) -> list[list[int]]:
        return [self.encode("Sure."), self.encode("</think>\n\nSure.")]

    def start(self, messages: Messages, tools: Sequence[Shown]) -> list[int]:
        fenced, self._encoder.contents = self.fence(with_objects(messages))
        return list(self._inner.render_ids(fenced, tools=self._specs(tools), add_generation_prompt=True))

    def extend(self, stream: Sequence[int], messages: Messages, tools: Sequence[Shown]) -> list[int]:
        if self._said is None:
            raise UserError(f"the renderer {self.family!r} cannot append to a sampled turn of {self.name!r}")
        fenced, self._encoder.contents = self.fence(messages)
        glue = self._bridge(self._said, stream[-1] if stream[-1] in self.stop_token_ids else None, fenced, tools)
        if not glue:
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(f"the renderer {self.family!r} cannot append the roles {roles}")
        return glue

    def _bridge(
        self,
        said: list[int],
        stop: int | None,
        messages: Messages | None = None,
        tools: Sequence[Shown] = (),
    ) -> list[int]:
        """What the package appends to a turn of ours. [] when it would rather render everything anew."""
        turn = said if stop is None else [*said, stop]
        new = messages or [{"role": "user", "content": "Go on."}]
        bridged = self._inner.bridge_to_next_turn(self._prompt, turn, new, tools=self._specs(tools))
        before = [*self._prompt, *turn]
        if bridged is None or list(bridged.token_ids[: len(before)]) != before:
            return []
        return list(bridged.token_ids[len(before) :])

    def _specs(self, tools: Sequence[Shown]) -> list[dict[str, Any]] | None:
        return [envelope(each) if self._enveloped else each.schema for each in tools] or None

    def parse(self, sampled: Sequence[int], tools: Sequence[Shown]) -> Parsed:
        if self._format is not None:
            ids = list(sampled)
            said = ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids
            return parse_turn(self.decode(said), self._format, tools, opened=self._opens_thought)
        response = self._inner.parse_response(list(sampled), tools=self._specs(tools))
        return Parsed((response.content or "").strip(), capped([_call(attempt) for attempt in response.tool_calls]))


class _Encoder:
    """The tokenizer as the package sees it: fenced contents stand in its text as keys, and are encoded apart."""

    def __init__(self, text: Text, tokenizer: HuggingFaceTokenizer) -> None:
        self._text, self._tokenizer = text, tokenizer
        self.contents: dict[str, str] = {}
        self.name_or_path: str = tokenizer.name_or_path
        self.unk_token_id: int | None = tokenizer.unk_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._text.encode_around(text, self.contents)

    def decode(self, token_ids: Any, **options: Any) -> str:
        return str(self._tokenizer.decode(token_ids, **options))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self._tokenizer.convert_tokens_to_ids(tokens)


def family_renderer(tokenizer: HuggingFaceTokenizer, folder: Path) -> FamilyRenderer | None:
    """The family's renderer, if the folder is of one and its template is the family's."""
    for family in _candidates(folder):
        try:
            for enveloped in (True, False):
                renderer = FamilyRenderer(tokenizer, family, enveloped=enveloped)
                if renderer.start(PROBE, [probe]) == _own(tokenizer):
                    return renderer
            log.info("%s looks like the family %s, but has a template of its own", folder, family)
        except Exception as error:  # control tokens that the vocabulary lacks, a template that the probe is not for
            log.info("%s is not of the family %s: %s", folder, family, error)
    return None


def _candidates(folder: Path) -> list[str]:
    known: dict[str, str] = import_module("renderers.base").MODEL_RENDERER_MAP
    config = folder / "config.json"
    kind = json.loads(config.read_text()).get("model_type", "") if config.is_file() else ""
    families = [family for model, family in known.items() if model.rpartition("/")[2] == folder.name]
    families += [family for family in known.values() if _letters(family) == _letters(kind)]
    return list(dict.fromkeys(families))


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


@tool
def probe(at: str) -> str:
    """Look at something."""
    return at


PROBE: Messages = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi."},
]


def _own(tokenizer: HuggingFaceTokenizer) -> list[int]:
    rendered = tokenizer.apply_chat_template(
        PROBE, tools=[envelope(probe)], add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return list(rendered["input_ids"])


def _call(attempt: Any) -> ToolCall:
    name: str = attempt.name or ""
    if attempt.status != "ok":
        return bad(f"the call could not be read ({attempt.status}): {attempt.raw[:200]}", name)
    arguments = attempt.arguments
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments or {}).decode()
    return checked(name, text.strip(), attempt.id or "")
