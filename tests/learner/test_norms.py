"""The faster RMSNorm is the model's own to rounding, with its gradients; other norms are left as they are."""

import pytest
import torch

from slipstream.learner.norms import speed_up_norms


class Norm(torch.nn.Module):
    """As in Llama, Qwen and most others; `offset` as in Gemma."""

    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 2, 8, dtype=torch.float64))
        self.variance_epsilon = 1e-6
        self._offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight + self._offset) * (x * scale)


@pytest.mark.parametrize("shape", [(8,), (3, 8), (1, 5, 2, 8), (0, 8)])
def test_values_and_gradients_are_those_of_the_formula(shape: tuple[int, ...]) -> None:
    plain, fast = Norm(), Norm()
    assert speed_up_norms(torch.nn.Sequential(fast)) == 1
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, dtype=torch.float64, generator=generator)
    slope = torch.randn(*shape, dtype=torch.float64, generator=generator)
    found = []
    for norm in (plain, fast):
        there = x.clone().requires_grad_()
        y = norm(there)
        (y * slope).sum().backward()
        found.append((y.detach(), there.grad, norm.weight.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


def test_a_norm_that_is_another_function_is_left_alone() -> None:
    other = Norm(offset=1.0)
    x = torch.randn(3, 8, dtype=torch.float64)
    before = other(x)
    assert speed_up_norms(torch.nn.Sequential(other, torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))) == 0
    assert other(x).equal(before)
