"""What runs inside the engine's own process: loading published weights, and proof that they arrived.

Invariant: nothing of the model is touched before names, dtypes, shapes and checksum of the published file were found
right; after loading, every parameter the engine computes with equals the published tensors, or the load is refused.

vLLM imports this module in each worker process (`worker_extension_cls`), before the model is built.
"""

import multiprocessing
from typing import TYPE_CHECKING

import msgspec

from slipstream.parent import die_with_parent
from slipstream.queue.messages import Weights
from slipstream.weights_file import checksum, differences, model_tensors, read_tensors

if TYPE_CHECKING:
    import torch


def keep_plain_weights_on_cpu() -> None:
    """vLLM's CPU build repacks linear weights at load time (oneDNN, AMX, ZenDNN) and computes with the packed copy: a
    later in-place load would change the originals only, silently. Plain weights cost little at sizes a CPU trains."""
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        utils.dispatch_cpu_unquantized_gemm = use_plain_weight


def use_plain_weight(layer: "torch.nn.Module", remove_weight: bool) -> None:
    import torch

    layer.cpu_linear = torch.nn.functional.linear  # pyright: ignore[reportArgumentType]


if multiprocessing.parent_process() is not None:  # a spawned engine; a forked one is told by `Engine.start`
    die_with_parent()
keep_plain_weights_on_cpu()


class WorkerExtension:
    """Mixed into vLLM's worker class."""

    model_runner: object
    vllm_config: object

    def load_published(self, weights_json: str) -> str:
        """'' when the weights are in place and proven, else what is wrong, in one line."""
        try:
            return self._load(msgspec.json.decode(weights_json, type=Weights))
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            return f"{type(error).__name__}: {error}"

    def _load(self, weights: Weights) -> str:
        tensors = read_tensors(weights)
        if problem := differences(weights.tensors, model_tensors(self.vllm_config.model_config.model)):  # pyright: ignore
            return problem
        if (found := checksum(tensors)) != weights.checksum:
            return f"checksum is {found}, published was {weights.checksum}"
        model = self.model_runner.get_model()  # pyright: ignore
        model.load_weights(iter(tensors.items()))
        return unlike(model, tensors)


def unlike(model: object, tensors: "dict[str, torch.Tensor]") -> str:
    """Names the first parameter that differs from what was published; '' when all are equal.

    vLLM fuses some tensors (`packed_modules_mapping`: qkv_proj of q, k and v); they are compared as fused. A published
    tensor that the engine has no place for counts as well: vLLM passes over some in silence (Qwen3's o_proj.bias).
    """
    import torch

    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    unused = set(tensors)
    for name, parameter in model.named_parameters():  # pyright: ignore
        module = next((part for part in name.split(".") if part in fused), None)
        sources = [name.replace(module, part) for part in fused[module]] if module else [name]
        if any(source not in tensors for source in sources):
            return f"the engine's {name} was not published (looked for {', '.join(sources)})"
        unused.difference_update(sources)
        expected = torch.cat([tensors[source] for source in sources]).to(parameter.device, parameter.dtype)
        # Vocabulary rows that vLLM pads are never sampled; what lies beyond the published rows does not count.
        if not torch.equal(parameter[: expected.shape[0]], expected):
            return f"the engine's {name} differs from what was published"
    return f"the engine has no place for {min(unused)}" if unused else ""
