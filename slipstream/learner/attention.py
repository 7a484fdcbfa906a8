"""Attention over the packed layout: every token sees its own trajectory's past, and nothing of any other.

Invariant: logits of a packed trajectory equal those of the trajectory alone. Each segment of the layout is an attention
of its own, over the segments before it and itself; or, where flash attention is installed, it takes the boundaries.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.errors import UserError
from slipstream.learner.sharing import Segment

PACKED_SDPA = "slipstream_packed_sdpa"
FLASH = "flash_attention_2"


class Pieces:
    """The segments of one forward pass, and masks that its layers share."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}

    def mask(self, segment: Segment, window: int | None, like: Tensor) -> Tensor | None:
        """[length, start + length] to add to scores; None where a plain causal attention does it."""
        narrow = window is not None and segment.start + segment.length > window
        if not segment.start and not narrow:
            return None
        key = (segment.start, segment.length, window if narrow else None)
        if key not in self._masks:
            hidden = torch.full(
                (segment.length, segment.start + segment.length), float("-inf"), dtype=like.dtype, device=like.device
            )
            mask = hidden.triu(segment.start + 1)
            if narrow:
                mask += hidden.tril(segment.start - (window or 0))
            self._masks[key] = mask
        return self._masks[key]


def packed_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    pieces: Pieces,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, H, U, D], key and value [1, H_kv, U, D] -> [1, U, H, D]."""
    if softcap is not None or s_aux is not None:
        raise UserError(
            "model.path: its attention has soft-capping or sinks, which the learner cannot compute yet; "
            "choose a model without"
        )
    lengths = [segment.length for segment in pieces.segments]
    grouped = key.shape[1] != query.shape[1]
    # split and not slices: the gradient of a split is one concatenation, that of a slice is as large as the whole.
    queries, keys, values = query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2)
    outs: list[Tensor] = []
    for index, segment in enumerate(pieces.segments):
        seen = (*segment.ancestors, index)
        mask = pieces.mask(segment, sliding_window, query)
        outs.append(
            F.scaled_dot_product_attention(
                queries[index],
                _along(keys, seen),
                _along(values, seen),
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=grouped,
            )
        )
    return torch.cat(outs, dim=2).transpose(1, 2).contiguous(), None


def _along(pieces: tuple[Tensor, ...], seen: tuple[int, ...]) -> Tensor:
    return pieces[seen[0]] if len(seen) == 1 else torch.cat([pieces[index] for index in seen], 2)


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
