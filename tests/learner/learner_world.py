"""What the learner's tests train on: a tiny model, trajectories as the queue hands them out, a config."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.config import (
    Config,
    EnvironmentSection,
    ModelSection,
    TasksSection,
)
from slipstream.queue.wire import decode, encode
from slipstream.trajectory import Outcome, Trajectory, VersionRun

VOCABULARY = 48


def save_tiny_model(folder: Path, **changes: Any) -> Path:
    """A Qwen3 of some thousand parameters with a tied head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    Qwen3ForCausalLM(Qwen3Config(**(shape | changes))).save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w1", pad_token="w0")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)


def trajectory(
    lease: int,
    group: int,
    *,
    length: int = 12,
    prompt: int = 4,
    reward: float | None = 0.0,
    outcome: Outcome = Outcome.FINISHED,
    versions: Sequence[int] | int = 0,
    logprob: float = -3.0,
    seed: int = 0,
) -> Trajectory:
    """`prompt` tokens that are not sampled, then `length - prompt` that are, of `versions` (one a token, or one)."""
    generator = torch.Generator().manual_seed(1_000 * lease + seed)
    ids = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
    sampled = [place >= prompt for place in range(length)]
    each = [versions] * (length - prompt) if isinstance(versions, int) else list(versions)
    runs = [VersionRun(1, -1)] * min(prompt, length) + [VersionRun(1, version) for version in each]
    noise = (0.1 * torch.randn(length, generator=generator)).tolist()
    return Trajectory(
        lease=lease,
        group=group,
        task=f"task {group}",
        attempt=0,
        token_ids=array("i", ids),
        sampled=bytearray(sampled),
        logprobs=array("f", [logprob + noise[place] if flag else 0.0 for place, flag in enumerate(sampled)]),
        version_runs=runs,
        spans=[],
        outcome=outcome,
        reward=reward,
        reward_parts={} if reward is None else {"answer": reward},
        turns=1,
    )


def taken(trajectories: Sequence[Trajectory]) -> list[Any]:
    """One record batch a trajectory, as `LearnerClient.take` returns them."""
    return [decode([memoryview(frame) for frame in encode([each])]) for each in trajectories]


def run(what: str, raw: dict[str, Any], root: str) -> None:
    """Be the "queue" or the "learner". Called in a process of its own, which is all that imports what it needs."""
    import learner_processes

    getattr(learner_processes, f"run_{what}")(raw, root)


def trainer_of(config: Config, policy: Any, optimizer: Any) -> Any:
    from slipstream.learner.step import Trainer
    from slipstream.learner.worker import Worker

    return Trainer(config, Worker(config, policy, optimizer))


def config(model: Path | str, **sections: Any) -> Config:
    return Config(
        model=ModelSection(path=str(model)),
        environment=EnvironmentSection(path="environment.py:environment"),
        tasks=TasksSection(train="tasks.jsonl"),
        **sections,
    )
