"""The learning rate by step, and the warm start that uses the same optimizer."""

from pathlib import Path

import pytest
import torch
from learner_world import VOCABULARY

from slipstream.learner.optimizer import Optimizer, learning_rate
from slipstream.learner.policy import Policy
from slipstream.learner.sft import Document, train_sft


def rates(warmup: int, schedule: str, steps: int = 10) -> list[float]:
    rate = learning_rate(1.0, warmup, steps, schedule)
    return [rate(step) for step in range(steps + 2)]


def test_warm_up_rises_to_the_peak_and_constant_stays() -> None:
    assert rates(3, "constant") == pytest.approx([0.25, 0.5, 0.75, *[1.0] * 9])


def test_linear_and_cosine_fall_to_zero_at_the_last_step() -> None:
    assert rates(0, "linear")[:11] == pytest.approx([1 - step / 10 for step in range(11)])
    assert rates(0, "linear")[11] == 0
    cosine = rates(2, "cosine")
    assert cosine[2] == 1.0
    assert cosine[6] == pytest.approx(0.5)
    assert cosine[10] == pytest.approx(0, abs=1e-12)
    assert cosine == sorted(cosine[:3]) + sorted(cosine[3:], reverse=True)


def test_clipping_bounds_the_gradient_and_reports_it_unclipped() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = Optimizer(
        [parameter], rate=lambda _: 0.1, clip_norm=1.0, betas=(0.0, 0.0), weight_decay=0.0
    )  # fmt: skip
    parameter.grad = torch.tensor([3.0, 4.0, 0.0, 0.0])
    stepped = optimizer.step(0)
    assert stepped.grad_norm == pytest.approx(5.0)
    assert (stepped.lr, stepped.skipped) == (0.1, False)
    assert parameter.grad is None
    # With betas of 0, exp_avg is the gradient that was used.
    used = optimizer.state()["0.exp_avg"]
    assert used.norm().item() == pytest.approx(1.0, abs=1e-5)


def test_weights_decay_towards_zero() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = Optimizer([parameter], rate=lambda _: 0.1, clip_norm=1.0, betas=(0.9, 0.95), weight_decay=0.5)
    parameter.grad = torch.zeros(1)
    optimizer.step(0)
    assert parameter.item() == pytest.approx(0.95)


def test_the_warm_start_learns_what_was_said_and_nothing_else(tiny_model: Path, tmp_path: Path) -> None:
    """Answers become likely; prompts, whose tokens are not `sampled`, do not."""
    generator = torch.Generator().manual_seed(3)
    documents = [
        Document(
            token_ids=torch.randint(2, VOCABULARY, (12,), generator=generator).tolist(),
            sampled=[False] * 6 + [True] * 6,
        )
        for _ in range(4)
    ]
    losses: list[float] = []
    train_sft(
        model=tiny_model,
        out=tmp_path / "out",
        batches=[documents] * 60,
        steps=60,
        lr=1e-2,
        warmup=3,
        on_step=lambda step, steps, loss: losses.append(loss),
    )
    assert len(losses) == 60
    assert losses[-1] < 0.3 < 3 < losses[0]
    policy = Policy(tmp_path / "out", chunk_tokens=64)
    ids = torch.tensor([token for document in documents for token in document.token_ids])
    sampled = torch.tensor([flag for document in documents for flag in document.sampled])
    logp = policy.logprobs(ids, torch.ones_like(sampled), torch.arange(0, 49, 12, dtype=torch.int32)).logp
    assert logp[sampled].mean() > -0.3
    assert logp[~sampled].mean() < -2
    assert (tmp_path / "out" / "chat_template.jinja").is_file()
