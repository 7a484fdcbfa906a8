"""Log-probs and entropy in chunks against torch's own, and their gradients against finite differences."""

import pytest
import torch

from slipstream.learner.head import head_logprobs


def world(bias: bool) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, offset = (
        torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in ((7, 5), (11, 5), (11,))
    )
    return [hidden, weight, offset if bias else None], torch.randint(0, 11, (7,), generator=generator)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_values_and_gradients(chunk: int, bias: bool) -> None:
    inputs, ids = world(bias)
    logp, entropy = head_logprobs(*inputs, ids, temperature=0.7, chunk=chunk)
    table = (torch.nn.functional.linear(*inputs) / 0.7).log_softmax(-1)
    torch.testing.assert_close(logp, table.gather(-1, ids[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(table.exp() * table).sum(-1))
    checked = [each for each in inputs if each is not None]
    of_both = lambda *some: head_logprobs(*some, *[None] * (3 - len(some)), ids, temperature=0.7, chunk=chunk)  # noqa: E731
    assert torch.autograd.gradcheck(of_both, checked)
    assert torch.autograd.gradcheck(lambda *some: of_both(*some)[0], checked)
    assert torch.autograd.gradcheck(lambda *some: of_both(*some)[1], checked)


def test_large_logits_stay_finite() -> None:
    hidden = torch.tensor([[300.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], requires_grad=True)
    logp, entropy = head_logprobs(hidden, weight, None, torch.tensor([1]), temperature=1.0, chunk=1)
    assert logp.item() == -600
    assert entropy.item() == pytest.approx(0, abs=1e-4)
    (logp + entropy).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()
