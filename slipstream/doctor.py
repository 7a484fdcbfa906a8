"""What `slipstream doctor` tries out before a run: the run's own code on a few tasks, and both sides' arithmetic.

Invariant: every finding is of something that was done here and now with the config's own model, tools and rewards;
nothing is written. It stands outside the rooms because rollouter and learner never import each other.
"""

import os
import shutil
import time
from collections import Counter
from collections.abc import Generator, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slipstream.config import Config
from slipstream.inputs import tasks_of
from slipstream.trajectory import TrajectoryDetail

if TYPE_CHECKING:
    from slipstream.agent_loop.environment import Environment
    from slipstream.agent_loop.renderer import Renderer
    from slipstream.task import Task
    from slipstream.trajectory import Trajectory

ATTEMPTS = 8
MOST_PROMPTS = 2000  # rendered to find those that are too long
# Mean |log-prob of the engine - the learner's|: float32 against float32 agrees to 1e-5, bfloat16 is some 0.03 off
# (measured with Qwen3 models); more than the last is another model, template or temperature.
AGREE, ROUGHLY = 1e-3, 0.2
BYTES_A_PARAMETER = 16  # of the learner: weights, gradients, and AdamW's two moments, in float32


class Verdict(StrEnum):
    """From the best to the worst."""

    OK = "ok"
    LOOK = "look"
    FAIL = "FAIL"


class Finding(msgspec.Struct, frozen=True):
    what: str
    verdict: Verdict
    says: str


def examine(config: Config) -> Iterator[Finding]:
    """Findings as they are made. Raises UserError where `check_inputs` would."""
    from slipstream.agent_loop.environment import load_environment
    from slipstream.agent_loop.renderer import create_renderer

    environment, renderer = load_environment(config.environment.path), create_renderer(config.model.path)
    train, heldout = tasks_of(config)
    yield _template(renderer)
    yield _tools(environment)
    yield _prompts(config, environment, renderer, train + heldout)
    yield _memory(config)
    yield _disk()
    trajectories = yield from _attempts(config, train[:ATTEMPTS])
    yield _agreement(config, trajectories)


def _template(renderer: "Renderer") -> Finding:
    stops = ", ".join(f"{renderer.decode([token])!r} ({token})" for token in renderer.stop_token_ids)
    return Finding("chat template", Verdict.OK, f"append-only, by {type(renderer).__name__}; a turn ends with {stops}")


def _tools(environment: "Environment") -> Finding:
    names = ", ".join(tool.name for tool in environment.tools)
    rewards = len(environment.rewards)
    if not rewards:
        return Finding("environment", Verdict.FAIL, "it has no reward: nothing can be learnt; give it `rewards=[...]`")
    return Finding("environment", Verdict.OK, f"tools: {names or 'none'}; rewards: {rewards}")


def _prompts(config: Config, environment: "Environment", renderer: "Renderer", tasks: "list[Task]") -> Finding:
    some = tasks[:MOST_PROMPTS]
    lengths = [len(renderer.start(environment.first_messages(task), environment.tools)) for task in some]
    most = config.engine.max_model_len
    long = sum(length >= most for length in lengths)
    room = most - max(lengths)
    says = f"{len(tasks):,} tasks; prompts of {min(lengths)} to {max(lengths)} tokens"
    if len(some) < len(tasks):
        says += f" (the first {len(some):,})"
    if long:
        return Finding(
            "prompts", Verdict.FAIL, f"{says}; {long:,} do not fit engine.max_model_len = {most}: raise it to more"
        )
    if room < config.rollout.max_tokens:
        wanted = max(lengths) + config.rollout.max_tokens
        return Finding(
            "prompts",
            Verdict.LOOK,
            f"{says}; the longest leaves {room} of engine.max_model_len = {most} for rollout.max_tokens = "
            f"{config.rollout.max_tokens} and tool results: set it to {wanted} or more if such tasks matter",
        )
    return Finding("prompts", Verdict.OK, says)


def _memory(config: Config) -> Finding:
    weights = sum(path.stat().st_size for path in Path(config.model.path).glob("*.safetensors"))
    needed = weights * (BYTES_A_PARAMETER // 4 + config.engine.rollouters) + (config.engine.kv_cache_mb << 20)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    says = f"weights of {weights / 1e6:,.0f} MB; learner, engines and KV cache at least {needed / 1e9:.1f} GB"
    says += f" of {there / 1e9:.0f} GB of main memory"
    return Finding("memory", Verdict.OK if needed < 0.8 * there else Verdict.LOOK, says)


def _disk() -> Finding:
    free = shutil.disk_usage(".").free
    says = f"{free / 1e9:.0f} GB free here for the journal and checkpoints"
    return Finding("disk", Verdict.OK if free > 2e9 else Verdict.LOOK, says)


def _attempts(config: Config, tasks: "list[Task]") -> "Generator[Finding, None, list[Trajectory]]":
    """A few training tasks, solved once each as in the run: engine, tools and rewards."""
    from slipstream.rollouter.evaluation import attempt_all

    began = time.monotonic()
    ended = attempt_all(config, tasks, 1, on_ended=lambda _: None)
    outcomes = Counter(trajectory.outcome.value for trajectory in ended)
    rewards = [trajectory.reward for trajectory in ended if trajectory.reward is not None]
    calls, errors = (sum(getattr(trajectory, name) for trajectory in ended) for name in ("tool_calls", "tool_errors"))
    says = f"{len(ended)} attempts in {time.monotonic() - began:.0f} s with the engine's start: "
    says += ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    says += f"; {calls} tool calls, {errors} errors; rewards {', '.join(f'{reward:g}' for reward in rewards) or 'none'}"
    if not rewards:
        errors_said = [text for trajectory in ended if (text := error_of(trajectory))]
        says += f". The first error: {errors_said[0]}" if errors_said else ""
        yield Finding("attempts", Verdict.FAIL, f"{says}: none has a reward, so that none can be trained on")
    else:
        yield Finding("attempts", Verdict.OK, says)
    return ended


def error_of(trajectory: "Trajectory") -> str:
    """The last line of what ended it."""
    if not trajectory.detail:
        return ""
    return msgspec.json.decode(trajectory.detail, type=TrajectoryDetail).error.strip().rpartition("\n")[2]


def _agreement(config: Config, trajectories: "list[Trajectory]") -> Finding:
    """The learner's log-probs of what the engine sampled."""
    import torch

    from slipstream.learner.assembly import settle_torch
    from slipstream.learner.policy import Policy
    from slipstream.queue import decode, encode, packed

    sampled = [trajectory for trajectory in trajectories if any(trajectory.sampled)]
    if not sampled:
        return Finding("engine = learner", Verdict.FAIL, "no attempt has a sampled token to compare")
    settle_torch(config)
    policy = Policy(config.model.path, chunk_tokens=config.learner.chunk_tokens, temperature=config.rollout.temperature)
    batch = packed(decode(encode(sampled)))
    with torch.no_grad():
        ours = policy.logprobs(batch.token_ids, batch.sampled, batch.branches).logp
    apart = (ours - batch.logprobs.to(ours))[batch.sampled].abs()
    says = f"log-probs of {len(apart):,} tokens are {apart.mean():.1e} apart (largest {apart.max():.1e})"
    if float(apart.mean()) < AGREE:
        return Finding("engine = learner", Verdict.OK, says)
    if float(apart.mean()) < ROUGHLY:
        return Finding(
            "engine = learner", Verdict.LOOK, f"{says}, as bfloat16 is from float32: keep correction.presets = ['tis']"
        )
    return Finding("engine = learner", Verdict.FAIL, f"{says}: they do not compute the same model")
