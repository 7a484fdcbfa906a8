"""From tokens to log-probs in one module, so that what is sharded is gathered when its call begins.

Invariant: the output head computes in the dtype of its weights, whatever the layers before it compute in.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.learner.head import head_logprobs


class Forward(torch.nn.Module):
    def __init__(self, model: Any, compute: torch.dtype | None) -> None:
        """`compute`: what matrix products are computed in; None for the weights' own."""
        super().__init__()
        self.model = model
        self._compute = compute

    def forward(
        self,
        arguments: dict[str, Any],
        at: Tensor,
        targets: Tensor | None = None,
        *,
        temperature: float = 1.0,
        chunk: int = 1,
        prove: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of `targets` int64 [R] and the entropy, [R] each, from the hidden states at `at` int64 [R].

        With `prove`: logits [R, V] as computed here, and as the model itself computes them.
        """
        head = self.model.get_output_embeddings()
        with torch.autocast(at.device.type, self._compute, enabled=self._compute is not None):
            hidden = self.model.base_model(**arguments).last_hidden_state[0].index_select(0, at)
            theirs = self.model(**arguments).logits[0].index_select(0, at) if prove else None
        hidden = hidden.to(head.weight.dtype)
        if theirs is not None or targets is None:
            assert theirs is not None
            return head(hidden), theirs.to(hidden.dtype)
        bias = getattr(head, "bias", None)
        return head_logprobs(hidden, head.weight, bias, targets, temperature=temperature, chunk=chunk)


def square_cost(model: Any) -> float:
    """What a token's attention to one earlier token costs, by what all the rest of it costs (multiplications: 2 x heads
    x head size a layer, half of them masked, against one a parameter; the embedding is a look-up)."""
    shape = model.config.get_text_config()
    size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    rest = sum(parameter.numel() for parameter in model.parameters()) - (0 if tied else embedding.numel())
    return shape.num_hidden_layers * shape.num_attention_heads * size / rest
