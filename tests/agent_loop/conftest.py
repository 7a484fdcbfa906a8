"""A small byte-level tokenizer with the demo's template, and samplers that say what a test tells them to."""

import asyncio
import random
import time
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream import AgentLoop, Environment
from slipstream.agent_loop.bridge import BridgeRenderer
from slipstream.agent_loop.renderer import Renderer, create_renderer
from slipstream.agent_loop.sampler import Finish, Sample, SampleRequest
from slipstream.config import RolloutSection
from slipstream.task import Task
from slipstream.trajectory import Trajectory, VersionRun

TEMPLATE = Path(__file__).parents[2] / "examples" / "calculator" / "chat_template.jinja"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


def train_tokenizer(template: str, markers: list[str] = MARKERS) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    words = "system user assistant tool name arguments description parameters required object string text echo"
    texts = [template, words, "Hello there, hello again. Say the answer: 1234 5678.\n\n\n", '{"name": "echo"}'] * 4
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    core.add_tokens([AddedToken(marker, normalized=False) for marker in markers])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def train() -> Callable[..., Any]:
    """A tokenizer for a template, and markers that are tokens of it."""
    return train_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return train_tokenizer(TEMPLATE.read_text())


@pytest.fixture(scope="session")
def model_folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def renderer(model_folder: Path) -> Renderer:
    made = create_renderer(str(model_folder))
    assert isinstance(made, BridgeRenderer)
    return made


Reply = str | Callable[[SampleRequest], Sample | Awaitable[Sample]]


class ScriptedSampler:
    """Says its replies one after the other, then `last` for ever, and remembers what it was asked.

    A text is sampled in random pieces, each encoded by itself, so that decoding and encoding it again gives other ids.
    """

    def __init__(self, renderer: Renderer, *replies: Reply, last: Reply = "done", max_model_len: int = 4096) -> None:
        self.max_model_len = max_model_len
        self.requests: list[SampleRequest] = []
        self.samples: list[Sample] = []
        self.running = 0
        self._renderer, self._replies, self._last = renderer, list(replies), last
        self._random = random.Random(0)

    async def sample(self, request: SampleRequest) -> Sample:
        self.requests.append(request)
        reply = self._replies.pop(0) if self._replies else self._last
        self.running += 1
        try:
            await asyncio.sleep(0)
            sample = self.say(reply, request) if isinstance(reply, str) else reply(request)
            if not isinstance(sample, Sample):
                sample = await sample
        finally:
            self.running -= 1
        self.samples.append(sample)
        return sample

    def say(self, text: str, request: SampleRequest) -> Sample:
        ids = [*self.pieces(text), self._renderer.stop_token_ids[0]]
        finish = Finish.STOP if len(ids) <= request.max_tokens else Finish.LENGTH
        return sampled(ids[: request.max_tokens], finish, version=len(self.requests))

    def pieces(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            length = next((len(marker) for marker in MARKERS if text.startswith(marker)), self._random.randint(1, 12))
            marker_ahead = min((at for marker in MARKERS if (at := text.find(marker)) > 0), default=len(text))
            piece = text[: min(length, marker_ahead)]
            ids += self._renderer.encode(piece)
            text = text[len(piece) :]
        return ids


def sampled(ids: list[int], finish: Finish, version: int = 0) -> Sample:
    return Sample(
        token_ids=array("i", ids),
        logprobs=array("f", [-0.5] * len(ids)),
        version_runs=[VersionRun(len(ids), version)] if ids else [],
        finish=finish,
        t_first_token=time.time(),
        seconds=0.01,
    )


@pytest.fixture
def script(renderer: Renderer) -> Callable[..., ScriptedSampler]:
    return lambda *replies, **options: ScriptedSampler(renderer, *replies, **options)


@pytest.fixture
def limits() -> RolloutSection:
    return RolloutSection(max_tokens=2000, max_turns=6, max_seconds=30, tool_seconds=5, tool_tokens=64)


@pytest.fixture
def play(renderer: Renderer, limits: RolloutSection) -> Callable[..., Awaitable[Trajectory]]:
    """Run one task in an environment with a sampler."""

    async def run(
        environment: Environment, sampler: ScriptedSampler, prompt: Any = "Say something.", **changed: Any
    ) -> Trajectory:
        loop = AgentLoop(environment, renderer, sampler, msgspec.structs.replace(limits, **changed))
        task = Task(id="t", prompt=prompt, answer="done")
        trajectory = await loop.run(lease=7, group=3, task=task, attempt=1, seed=11, t_leased=1.0)
        assert sampler.running == 0
        assert loop.tokens_in_flight(7) == 0
        return trajectory

    return run


@pytest.fixture(scope="session")
def plain_renderer() -> BridgeRenderer:
    """Of a template that knows nothing of tools."""
    turn = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    start = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    return BridgeRenderer(train_tokenizer("{% for m in messages %}" + turn + "{% endfor %}" + start))
