"""Log-probs and entropy from hidden states, without all logits at once.

Invariant: no more than `chunk` rows of logits exist at any time, forward or backward: forward keeps one normalizer a
row, and backward makes each chunk's logits again.
"""

from typing import Any

import torch
from torch import Tensor


def head_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, *, temperature: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """hidden [R, H], weight [V, H], bias [V], token_ids int64 [R] -> the tokens' log-probs and the entropy, [R] each.

    Both are differentiable.
    """
    return _Head.apply(hidden, weight, bias, token_ids, temperature, chunk)  # pyright: ignore[reportReturnType]


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        normalizer, logp, entropy = (hidden.new_empty(len(hidden)) for _ in range(3))
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = _logits(hidden[rows], weight, bias, temperature)
            normalizer[rows] = logits.logsumexp(-1)
            logp[rows] = logits.gather(-1, token_ids[rows, None])[:, 0] - normalizer[rows]
            probabilities = (logits - normalizer[rows, None]).exp_()
            entropy[rows] = normalizer[rows] - torch.linalg.vecdot(probabilities, logits)
        ctx.save_for_backward(hidden, weight, bias, token_ids, normalizer, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        of_logp, of_entropy = grads
        hidden, weight, bias, token_ids, normalizer, entropy = ctx.saved_tensors
        if of_logp is None:
            of_logp = torch.zeros_like(normalizer)
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias) if bias is not None else None
        for start in range(0, len(hidden), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logits = _logits(hidden[rows], weight, bias, ctx.temperature)
            logits -= normalizer[rows, None]
            # d logp / d logits = 1(token) - p; d entropy / d logits = -p (log p + entropy)
            pull = -of_logp[rows, None]
            if of_entropy is not None:
                pull = pull - of_entropy[rows, None] * (logits + entropy[rows, None])
            slope = logits.exp_().mul_(pull)
            slope.scatter_add_(-1, token_ids[rows, None], of_logp[rows, None])
            slope /= ctx.temperature
            of_hidden[rows] = slope @ weight
            if of_weight is not None:
                of_weight.addmm_(slope.T, hidden[rows])
            if of_bias is not None:
                of_bias += slope.sum(0)
        return of_hidden, of_weight, of_bias, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return logits if temperature == 1 else logits.div_(temperature)
