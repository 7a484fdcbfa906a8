"""Attention over the packed layout: every token sees its own trajectory's past, and nothing of any other.

Invariant: logits of a packed trajectory equal those of the trajectory alone. There is no mask to get wrong: on a CPU
each trajectory is a causal attention of its own; on CUDA flash attention takes the boundaries (`cu_seqlens`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED_SDPA = "slipstream_packed_sdpa"


def packed_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    cu_seq_lens_q: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D]."""
    grouped = key.shape[1] != query.shape[1]
    bounds = cu_seq_lens_q.tolist()
    pieces = [
        F.scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            is_causal=True,
            scale=scaling,
            enable_gqa=grouped,
        )
        for start, end in zip(bounds, bounds[1:], strict=False)
        if end > start
    ]
    return torch.cat(pieces, dim=2).transpose(1, 2).contiguous(), None


def choose_attention(device: torch.device) -> str:
    """Register what is ours, and name the implementation for `device` to transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.utils import is_flash_attn_2_available

    if device.type == "cuda" and is_flash_attn_2_available():
        return "flash_attention_2"
    AttentionInterface.register(PACKED_SDPA, packed_sdpa)
    AttentionMaskInterface.register(PACKED_SDPA, lambda *_, **__: None)
    return PACKED_SDPA
