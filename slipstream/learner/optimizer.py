"""AdamW with warm-up, schedule, clipping, and a refusal to step on what is not finite.

Invariant: after `step` the parameters are finite if they were before; a skipped step leaves parameters and moments as
they were. The learning rate is a function of the step number alone, so that a resumed run goes on with the same.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.learner.sharding import whole


class Stepped(NamedTuple):
    grad_norm: float  # before clipping; inf or nan when skipped
    skipped: bool
    lr: float


def learning_rate(peak: float, warmup: int, steps: int, schedule: str) -> Callable[[int], float]:
    """Step 0, 1, ... to its learning rate: linear warm-up, then constant, or falling to 0 at `steps`."""

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / (warmup + 1)
        if schedule == "constant":
            return peak
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return peak * ((1 - done) if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))

    return rate


class Optimizer:
    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        *,
        rate: Callable[[int], float],
        clip_norm: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        self._parameters, self._rate, self._clip = parameters, rate, clip_norm
        self._adamw = torch.optim.AdamW(parameters, lr=rate(0), betas=betas, weight_decay=weight_decay, fused=True)

    def step(self, number: int, *, divisor: float = 1.0, scale: float = 1.0) -> Stepped:
        """Step `number` (0 first) with the gradients that are there, divided by `divisor`, at `scale` times the rate of
        that step; they are cleared afterwards."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad /= divisor
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)))
        lr = self._rate(number) * scale
        skipped = not math.isfinite(norm)
        if not skipped:
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        self.clear()
        return Stepped(norm, skipped, lr)

    def clear(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """By "NUMBER.NAME": the parameter's place, and what AdamW calls it. Nothing of a parameter never stepped."""
        return {
            f"{place}.{name}": tensor
            for place, parameter in enumerate(self._parameters)
            for name, tensor in self._adamw.state.get(parameter, {}).items()
        }

    def blank(self, names: list[str]) -> dict[str, Tensor]:
        """Tensors of the shape and sharding of those of `state`, to be filled. Raises KeyError for another's."""
        found: dict[str, Tensor] = {}
        for name in names:
            place, _, key = name.partition(".")
            if int(place) >= len(self._parameters):
                raise KeyError(f"there is no parameter {place} in this model")
            found[name] = torch.zeros(()) if key == "step" else torch.zeros_like(self._parameters[int(place)])
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        """What `state` gave."""
        self._adamw.state.clear()
        for name, tensor in state.items():
            place, _, key = name.partition(".")
            self._adamw.state[self._parameters[int(place)]][key] = tensor
