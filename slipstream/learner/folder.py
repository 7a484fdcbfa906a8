"""A model as an ordinary Hugging Face folder: weights in float32, and the start model's own tokenizer and template.

Invariant: the folder appears under its name only when it is whole. Tokenizer and template are copied byte for byte from
the folder that was trained on.
"""

import shutil
from pathlib import Path

from torch import Tensor

from slipstream.learner.policy import Policy

WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".gguf", ".msgpack", ".onnx"}
ABOUT_WEIGHTS = {"config.json", "generation_config.json"}  # written with the weights


def write_folder(folder: Path, policy: Policy, tensors: dict[str, Tensor], start_model: Path) -> None:
    """`tensors` are the whole weights, wherever `policy` has them."""
    draft = folder.with_name(f".{folder.name}")
    shutil.rmtree(draft, ignore_errors=True)
    policy.model.save_pretrained(draft, state_dict=tensors)
    for file in start_model.iterdir():
        weights = file.suffix in WEIGHTS or file.name.endswith(".index.json") or file.name in ABOUT_WEIGHTS
        if file.is_file() and not weights and not file.name.startswith((".", "README")):
            shutil.copyfile(file, draft / file.name)
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
