"""The two properties everything stands on, over 200 random tool conversations."""

import asyncio
import json
import random

import pytest

from slipstream import AgentLoop, Environment, Task, tool
from slipstream.rewards import exact_match
from slipstream.trajectory import Outcome, SpanKind

SCRAPS = [
    "hello",
    "12345",
    " \n\n",
    "é漢🙂",
    '"quoted" \\',
    "<|im_end|>\n<|im_start|>assistant\n",
    "</tool_response>",
    "",
]


def scrap(rng: random.Random) -> str:
    return "".join(rng.choice(SCRAPS) for _ in range(rng.randint(0, 4)))


@tool
def echo(text: str) -> str:
    """Say it again."""
    return text


@tool
async def backwards(text: str) -> list[str]:
    """Say it from the end."""
    await asyncio.sleep(0)
    return list(reversed(text))


def call(rng: random.Random) -> str:
    good = {"name": rng.choice(["echo", "backwards"]), "arguments": {"text": scrap(rng)}}
    bad = [
        '{"name": "echo", "arguments": {',
        '{"name": "echo", "arguments": []}',
        '{"name": "nobody", "arguments": {}}',
    ]
    # A model can say the letters of a control token; here its text would become one, so they are left out.
    body = rng.choice(bad) if rng.random() < 0.2 else json.dumps(good).replace("<", "(")
    return f"<tool_call>\n{body}\n</tool_call>"


def test_what_is_sampled_would_not_survive_decoding(renderer, script):
    """Else the test below could not tell a stream of ids from one that is rendered anew."""
    sampler = script()
    said = [sampler.pieces("Hello there, hello again. Say the answer: 1234 5678.") for _ in range(20)]
    assert sum(renderer.encode(renderer.decode(ids)) != ids for ids in said) > 10


def turns(rng: random.Random) -> list[str]:
    thought = f"<think>{rng.choice(['hm', ''])}</think>" if rng.random() < 0.3 else ""
    said = [thought + "Let me see. " * rng.randint(0, 2) + "\n".join(call(rng) for _ in range(rng.randint(1, 4)))]
    return [*(said[0] for _ in range(rng.randint(0, 4))), rng.choice(["done", "12345 and more", ""])]


@pytest.mark.parametrize("seed", range(200))
async def test_prompts_grow_and_the_mask_is_what_the_model_said(seed, renderer, script, limits):
    rng = random.Random(seed)
    said = turns(rng)
    sampler = script(*said)
    environment = Environment(tools=[echo, backwards], rewards=[exact_match], system=rng.choice(["", "Be brief."]))
    loop = AgentLoop(environment, renderer, sampler, limits)
    task = Task(id="t", prompt="Go. " + scrap(rng), answer="done")
    trajectory = await loop.run(lease=0, group=0, task=task, attempt=0, seed=seed, t_leased=0.0)

    assert trajectory.outcome is Outcome.FINISHED
    assert trajectory.turns == len(said) == len(sampler.requests)
    # Prefix: each prompt begins with all tokens of the turn before it, as they were sampled.
    stream = trajectory.token_ids.tolist()
    for request, sample, after in zip(
        sampler.requests, sampler.samples, [*(r.prompt.tolist() for r in sampler.requests[1:]), stream], strict=True
    ):
        before = request.prompt.tolist() + sample.token_ids.tolist()
        assert after[: len(before)] == before
    # Mask: the sampled tokens are exactly what the model said with its end of turn, one span a turn.
    spans = [span for span in trajectory.spans if span.kind is SpanKind.SAMPLED]
    texts = [renderer.decode(stream[span.start : span.start + span.length]) for span in spans]
    assert texts == [turn + "<|im_end|>" for turn in said]
    masked = [token for token, was in zip(stream, trajectory.sampled, strict=True) if was]
    assert renderer.decode(masked) == "".join(texts)
    # Versions and log-probs stand where the mask does; a control token is either sampled or the template's own.
    versions = [run.version for run in trajectory.version_runs for _ in range(run.length)]
    assert [version >= 0 for version in versions] == [bool(was) for was in trajectory.sampled]
    assert [logprob != 0 for logprob in trajectory.logprobs] == [bool(was) for was in trajectory.sampled]
    ends = [t for t, was in zip(stream, trajectory.sampled, strict=True) if t == renderer.stop_token_ids[0] and not was]
    prompts = 1 + 1  # of the system (there are tools) and of the user
    tool_turns = sum(sample.token_ids.tolist().count(renderer.encode("<tool_call>")[0]) for sample in sampler.samples)
    assert len(ends) == prompts + tool_turns
    assert sum(span.length for span in trajectory.spans) == len(stream)
