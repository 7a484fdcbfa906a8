"""Supervised warm start with the packing, masks, log-probs and optimizer of RL.

Invariant: the loss is over `sampled` tokens only (what an assistant said, its end of turn included), each counts once.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import torch

from slipstream.learner.losses import aggregate
from slipstream.learner.optimizer import Optimizer, learning_rate
from slipstream.learner.policy import Policy


class Document(msgspec.Struct):
    """A dialogue as a rollout would have it."""

    token_ids: list[int]
    sampled: list[bool]


def train_sft(
    *,
    model: Path,
    out: Path,
    batches: Iterable[list[Document]],
    steps: int,
    lr: float,
    warmup: int,
    on_step: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> None:
    """One optimizer step a batch, learning rate falling to 0 over `steps`; saves a Hugging Face folder in `out`.

    `on_step(step, steps, loss)` is called after each step.
    """
    policy = Policy(model, chunk_tokens=1 << 16)
    optimizer = Optimizer(
        policy.parameters(),
        rate=learning_rate(lr, warmup, steps, "cosine"),
        clip_norm=1.0,
        betas=(0.9, 0.95),
        weight_decay=0.01,
    )
    for step, batch in enumerate(batches):
        token_ids = torch.tensor([token for document in batch for token in document.token_ids], device=policy.device)
        sampled = torch.tensor([flag for document in batch for flag in document.sampled], device=policy.device)
        lengths = torch.tensor([0] + [len(document.token_ids) for document in batch])
        cu_seqlens = lengths.cumsum(0).to(policy.device, torch.int32)
        logp = policy.logprobs(token_ids, sampled, cu_seqlens).logp
        loss = aggregate(-logp, sampled, cu_seqlens, mode="token_mean")
        loss.backward()
        optimizer.step(step)
        on_step(step + 1, steps, float(loss.detach()))
    policy.save(out, tokenizer_from=model)
