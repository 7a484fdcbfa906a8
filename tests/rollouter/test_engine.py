"""A real vLLM engine: log-probs, versions and in-flight weights against the same model in transformers.

The engine process is spawned here, not forked: the test process already has threads.
"""

import asyncio
from array import array
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from slipstream.agent_loop.sampler import Finish, Sample, SampleRequest
from slipstream.config import EngineSection
from slipstream.queue.messages import TensorInfo, Weights
from slipstream.rollouter.engine import Engine, WeightsRejected, prepare_environment
from slipstream.weights_file import checksum

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

VOCABULARY, STOP = 300, 2
SECTION = EngineSection(max_model_len=512, kv_cache_mb=64, start="spawn")


def save_model(folder: Path) -> None:
    torch.manual_seed(0)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.1,
            eos_token_id=STOP,
            pad_token_id=0,
        )
    ).save_pretrained(folder)


class Publisher:
    """Publishes versions of one model, and knows what transformers computes with each."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.start = load_file(model / "model.safetensors")
        self.folder, self.version = folder, -1
        self.models: dict[int, torch.nn.Module] = {}
        self._model = model

    def publish(self, tensors: dict[str, torch.Tensor]) -> Weights:
        self.version += 1
        path = self.folder / f"v{self.version}.safetensors"
        save_file(tensors, path)
        model = AutoModelForCausalLM.from_pretrained(self._model, dtype=torch.float32)
        model.load_state_dict(tensors, strict=False)
        model.tie_weights()
        self.models[self.version] = model.eval()
        infos = [TensorInfo(name, "float32", list(tensor.shape)) for name, tensor in tensors.items()]
        return Weights(version=self.version, location=str(path), checksum=checksum(tensors), tensors=infos)

    def changed(self, part: str = "") -> Weights:
        """The start weights with noise on every tensor whose name contains `part`."""
        torch.manual_seed(self.version + 7)
        noisy = {n: t + 0.05 * torch.randn_like(t) if part in n else t.clone() for n, t in self.start.items()}
        return self.publish(noisy)

    @torch.no_grad()
    def logprobs(self, prompt: array, sample: Sample) -> torch.Tensor:
        """What each sampled token's log-prob should be: positions fed under a version keep that version's KV."""
        ids = torch.tensor([*prompt, *sample.token_ids])[None]
        past, at, logits = None, 0, []
        boundary = len(prompt) - 1  # the last prompt token is fed in the step that makes the first output token
        for run in sample.version_runs:
            boundary += run.length
            out = self.models[run.version](ids[:, at:boundary], past_key_values=past, use_cache=True)
            past, at = out.past_key_values, boundary
            logits.append(out.logits[0])
        rows = torch.cat(logits)[len(prompt) - 1 :]
        return rows.log_softmax(-1).gather(1, torch.tensor([*sample.token_ids])[:, None])[:, 0]


def request(length: int, *, seed: int, tokens: int = 40, **more: float) -> SampleRequest:
    prompt = array("i", [3 + (seed * 31 + i * 7) % (VOCABULARY - 3) for i in range(length)])
    return SampleRequest(prompt=prompt, max_tokens=tokens, stop_token_ids=[STOP], temperature=0.8, seed=seed, **more)


def differs(publisher: Publisher, asked: SampleRequest, sample: Sample) -> float:
    """Largest log-prob difference; logits are divided by the temperature, as sampled."""
    for model in publisher.models.values():
        model.lm_head.register_forward_hook(lambda _m, _i, out: out / asked.temperature) if not getattr(
            model, "tempered", False
        ) else None
        model.tempered = True
    expected = publisher.logprobs(asked.prompt, sample)
    return (expected - torch.tensor(sample.logprobs)).abs().max().item()


@pytest.fixture(scope="module")
def publisher(tmp_path_factory: pytest.TempPathFactory) -> Publisher:
    folder = tmp_path_factory.mktemp("engine")
    save_model(folder / "model")
    return Publisher(folder / "model", folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(publisher: Publisher):
    prepare_environment(SECTION)
    engine = Engine.start(str(publisher.folder / "model"), "auto", SECTION, concurrency=4)
    await engine.load(publisher.publish(publisher.start))
    yield engine
    engine.shutdown()


async def test_logprobs_are_of_the_distribution_sampled_from(engine: Engine, publisher: Publisher) -> None:
    asked = [request(length, seed=length) for length in (1, 31, 32, 33, 100)]
    for one, sample in zip(asked, await asyncio.gather(*map(engine.sample, asked)), strict=True):
        assert differs(publisher, one, sample) < 1e-4


async def test_a_prompt_of_more_than_a_block_is_not_prefilled_twice(engine: Engine) -> None:
    """The CPU platform's own block, 128 tokens, is longer than many a system prompt; `engine.block_size` is not."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    async def cached(length: int, name: str) -> int | None:
        prompt = tokens_input(request(length, seed=77).prompt.tolist(), cache_salt="prefix test")
        stream = engine._llm.generate(prompt, SamplingParams(max_tokens=1, detokenize=False), request_id=name)  # pyright: ignore
        return [output.num_cached_tokens async for output in stream][-1]

    block = SECTION.block_size
    assert block < 128
    assert await cached(100, "first") == 0
    assert await cached(100, "again") == 100 // block * block
    assert await cached(block - 1, "less than a block") == 0


async def test_bfloat16_is_the_mismatch_that_float32_is_not(engine: Engine, publisher: Publisher) -> None:
    """An engine in bfloat16 against the same weights in float32: what `mismatch/*` is there to show."""
    from slipstream.learner.corrections import correct

    half = Engine.start(str(publisher.folder / "model"), "bfloat16", SECTION, concurrency=4)
    try:
        await half.load(publisher.publish(publisher.start))
        await engine.load(publisher.publish(publisher.start))
        asked = [request(40, seed=seed) for seed in range(8)]
        kl: list[float] = []
        for each in (half, engine):
            samples = await asyncio.gather(*map(each.sample, asked))
            rollout = torch.cat([torch.tensor(sample.logprobs) for sample in samples])
            for one, sample in zip(asked, samples, strict=True):
                differs(publisher, one, sample)
            learner = torch.cat([publisher.logprobs(one.prompt, s) for one, s in zip(asked, samples, strict=True)])
            sampled = torch.ones(len(rollout), dtype=torch.bool)
            bounds = torch.tensor([0, len(rollout)], dtype=torch.int32)
            kl.append(correct(learner, rollout, sampled, bounds, []).stats.kl_k3)
        of_half, of_float = kl
        assert of_float < 1e-9
        assert 1e-6 < of_half < 1e-1
    finally:
        half.shutdown()


async def test_a_stop_token_is_in_the_sample_with_its_logprob(engine: Engine) -> None:
    samples = await asyncio.gather(*(engine.sample(request(5, seed=seed, tokens=200)) for seed in range(30)))
    stopped = [sample for sample in samples if sample.finish is Finish.STOP]
    assert stopped
    for sample in stopped:
        assert sample.token_ids[-1] == STOP
        assert STOP not in sample.token_ids[:-1]
        assert len(sample.logprobs) == len(sample.token_ids)


@pytest.mark.parametrize(
    "part",
    ["embed", "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "gate_proj", "up_proj", "down_proj", "layernorm", ""],
)
async def test_every_kind_of_parameter_arrives(engine: Engine, publisher: Publisher, part: str) -> None:
    """The same prompt before and after: neither a packed copy of a weight nor the prefix cache may answer for it."""
    asked = request(100, seed=5)
    await engine.sample(asked)
    await engine.load(publisher.changed(part))
    after = await engine.sample(asked)
    assert {run.version for run in after.version_runs} == {publisher.version}
    assert differs(publisher, asked, after) < 1e-4


async def test_requests_running_and_waiting_during_an_update_know_their_versions(
    engine: Engine, publisher: Publisher
) -> None:
    """Twelve requests on four slots: some decode, some wait; two updates come in between."""
    asked = [request(20 + 10 * seed, seed=seed, tokens=200) for seed in range(12)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.sample(one)) for one in asked]
        await asyncio.sleep(0)
        for _ in range(2):
            while engine.running < 6 or not any(task.done() for task in tasks):
                if all(task.done() for task in tasks):
                    break
                await asyncio.sleep(0.01)
            await engine.load(publisher.changed())
    versions = set()
    for one, task in zip(asked, tasks, strict=True):
        assert differs(publisher, one, task.result()) < 1e-4
        versions |= {run.version for run in task.result().version_runs}
    assert len(versions) >= 2


async def test_a_request_past_its_seconds_hands_over_what_it_has(engine: Engine, publisher: Publisher) -> None:
    for seconds in (0.1, 0.2, 0.4, 0.8, 1.6):  # a busy machine may have nothing yet
        asked = request(20, seed=1, tokens=480, seconds=seconds)
        asked.stop_token_ids = []
        sample = await engine.sample(asked)
        if sample.token_ids:
            break
    assert sample.finish is Finish.ABORTED
    assert 0 < len(sample.token_ids) < 480
    assert sum(run.length for run in sample.version_runs) == len(sample.logprobs) == len(sample.token_ids)
    assert differs(publisher, asked, sample) < 1e-4


def without(weights: Weights) -> Weights:
    return Weights(version=99, location=weights.location, checksum=weights.checksum, tensors=weights.tensors[1:])


def misshapen(weights: Weights) -> Weights:
    first = weights.tensors[0]
    wrong = TensorInfo(first.name, first.dtype, [*first.shape, 1])
    return Weights(
        version=99, location=weights.location, checksum=weights.checksum, tensors=[wrong, *weights.tensors[1:]]
    )


def forged(weights: Weights) -> Weights:
    return Weights(version=99, location=weights.location, checksum="00" * 16, tensors=weights.tensors)


def missing(weights: Weights) -> Weights:
    return Weights(version=99, location=weights.location + ".gone", checksum=weights.checksum, tensors=weights.tensors)


@pytest.mark.parametrize("spoil", [without, misshapen, forged, missing])
async def test_weights_that_do_not_fit_are_refused_untouched(engine: Engine, publisher: Publisher, spoil) -> None:
    good = publisher.changed()
    await engine.load(good)
    with pytest.raises(WeightsRejected, match="version 99"):
        await engine.load(spoil(good))
    assert engine.version == good.version
    asked = request(50, seed=3)
    assert differs(publisher, asked, await engine.sample(asked)) < 1e-4


async def test_a_tensor_the_engine_has_no_place_for_is_named(engine: Engine, publisher: Publisher) -> None:
    """vLLM's loader passes over Qwen3's o_proj.bias in silence; `differences` and `unlike` must not."""
    extra = dict(publisher.start) | {"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}
    with pytest.raises(WeightsRejected, match=r"o_proj\.bias"):
        await engine.load(publisher.publish(extra))
