"""Publishing weights: version v as a safetensors file that rollouters on this host (or on a shared folder) can read.

Invariant: a file appears under its name only when it is whole; the newest few stay, so that who reads one is not cut
off; what this run put into shared memory is gone when the learner ends, or when the next one of the run begins.
"""

import hashlib
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from slipstream.config import Config, RunDir
from slipstream.queue.messages import TensorInfo, Weights
from slipstream.weights_file import checksum

KEPT = 3
SHARED_MEMORY = Path("/dev/shm")


def weights_directory(config: Config, run_dir: RunDir, nbytes: int) -> Path:
    """`weights.directory`; else a folder in shared memory if there is room for the versions kept; else RUN/weights."""
    if config.weights.directory:
        return Path(config.weights.directory)
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > (KEPT + 1) * nbytes:
        name = hashlib.blake2b(str(run_dir.root.resolve()).encode(), digest_size=8).hexdigest()
        return SHARED_MEMORY / f"slipstream-{name}"
    return run_dir.weights


class Publisher:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._temporary = SHARED_MEMORY in directory.parents
        if self._temporary:
            shutil.rmtree(directory, ignore_errors=True)  # of a learner that was killed
        directory.mkdir(parents=True, exist_ok=True)

    def publish(self, version: int, tensors: dict[str, torch.Tensor]) -> Weights:
        """Write version `version`; older ones than the last few go."""
        cpu = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in tensors.items()}
        path = self._directory / f"v{version:08d}.safetensors"
        draft = path.with_suffix(".draft")
        save_file(cpu, draft)
        draft.rename(path)
        for old in sorted(self._directory.glob("v*.safetensors"))[:-KEPT]:
            old.unlink(missing_ok=True)
        return Weights(
            version=version,
            location=str(path),
            checksum=checksum(cpu),
            tensors=[TensorInfo(name, "float32", list(tensor.shape)) for name, tensor in cpu.items()],
        )

    def close(self) -> None:
        if self._temporary:
            shutil.rmtree(self._directory, ignore_errors=True)
