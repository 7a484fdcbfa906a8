"""A model's parameters in shards, one a rank: FSDP2, one group a layer, and one for all else.

Invariant: what is sharded is a DTensor on dimension 0, as are its gradient and moments. Gradients are the mean over
ranks of what each rank's backward pass made.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def shard(forward: torch.nn.Module, model: Any, mesh: DeviceMesh) -> None:
    """In place; each rank has the whole model, and keeps its part. `forward` is what is called."""
    layers = set(getattr(model, "_no_split_modules", None) or [])
    for module in model.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh)
    # Else its parameters are whole ones between a forward pass without gradient and whatever comes next, a step say.
    fully_shard(forward, mesh=mesh, reshard_after_forward=True)


def whole(tensor: Tensor) -> Tensor:
    """All of it; of a sharded one, by all ranks together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
