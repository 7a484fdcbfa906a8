"""Attention over the packed layout: every token sees its own trajectory's past, and nothing of any other.

Invariant: logits of a packed trajectory equal those of the trajectory alone. There is no mask to get wrong: each
trajectory is a causal attention of its own, or, where flash attention is installed, it takes the boundaries.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.errors import UserError
from slipstream.learner.packing import lengths_of

PACKED_SDPA = "slipstream_packed_sdpa"
FLASH = "flash_attention_2"


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
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D]."""
    if softcap is not None or s_aux is not None:
        raise UserError(
            "model.path: its attention has soft-capping or sinks, which the learner cannot compute yet; "
            "choose a model without"
        )
    lengths = lengths_of(cu_seq_lens_q).tolist()
    grouped = key.shape[1] != query.shape[1]
    # split and not slices: the gradient of a split is one concatenation, that of a slice is as large as the whole.
    pieces = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    outs: list[Tensor] = []
    for (q, k, v), length in zip(pieces, lengths, strict=True):
        if not length:
            continue
        narrow = sliding_window is not None and length > sliding_window
        mask = _window(length, sliding_window, query.device) if narrow else None
        outs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=not narrow, scale=scaling, enable_gqa=grouped
            )
        )
    return torch.cat(outs, dim=2).transpose(1, 2).contiguous(), None


def _window(length: int, width: int | None, device: torch.device) -> Tensor:
    """bool [length, length]: the last `width` positions, its own included."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - (width or 0))


def choose_attention(device: torch.device) -> str:
    """Register what is ours, and name the implementation for `device` to transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.utils.import_utils import is_flash_attn_2_available

    if device.type == "cuda" and is_flash_attn_2_available():
        return FLASH
    AttentionInterface.register(PACKED_SDPA, packed_sdpa)
    AttentionMaskInterface.register(PACKED_SDPA, lambda *_, **__: None)
    return PACKED_SDPA
