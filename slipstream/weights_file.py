"""A published version as a safetensors file: its manifest, its checksum, and what does not fit.

Invariant: learner and rollouter describe the same bytes with the same functions; there is one definition of each.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.queue.messages import TensorInfo, Weights

if TYPE_CHECKING:
    import torch


def read_tensors(weights: Weights) -> "dict[str, torch.Tensor]":
    """The published tensors in the order of the manifest."""
    from safetensors import safe_open

    with safe_open(weights.location, "pt") as file:
        return {info.name: file.get_tensor(info.name) for info in weights.tensors}


def model_tensors(folder: str) -> dict[str, list[int]]:
    """Names and shapes of the tensors that the engine's own start model is made of."""
    from safetensors import safe_open

    shapes: dict[str, list[int]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(str(path), "pt") as file:
            shapes.update({name: file.get_slice(name).get_shape() for name in file.keys()})  # noqa: SIM118
    return shapes


def differences(published: list[TensorInfo], expected: dict[str, list[int]]) -> str:
    """One line that names what does not fit, or ''."""
    names = {info.name for info in published}
    if missing := sorted(expected.keys() - names):
        return f"{len(missing)} tensors are missing, the first is {missing[0]}"
    for info in published:
        if info.name not in expected:
            return f"tensor {info.name} is not one of the model's"
        if info.shape != expected[info.name]:
            return f"tensor {info.name} has shape {info.shape}, the model has {expected[info.name]}"
        if info.dtype not in ("float32", "bfloat16", "float16"):
            return f"tensor {info.name} has dtype {info.dtype}, expected float32, bfloat16 or float16"
    return ""


def checksum(tensors: "dict[str, torch.Tensor]") -> str:
    """blake2b-128 over the tensors' bytes, in order."""
    import torch

    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors.values():
        digest.update(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))  # pyright: ignore[reportArgumentType]
    return digest.hexdigest()
