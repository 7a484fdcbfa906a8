"""Publishing weights: version v as a safetensors file that rollouters on this host (or on a shared folder) can read.

Invariant: a file appears under its name only when it is whole; the newest few stay, so that who reads one is not cut
off; what this run put into shared memory is gone when the learner ends, and what a run left there that was killed for
good is gone when the next learner of any run begins.
"""

import contextlib
import fcntl
import hashlib
import shutil
import time
from pathlib import Path
from typing import IO

import torch
from safetensors.torch import save_file

from slipstream.config import Config, RunDir
from slipstream.queue.messages import TensorInfo, Weights
from slipstream.weights_file import checksum

KEPT = 3
SHARED_MEMORY = Path("/dev/shm")
LOCK = "learner.lock"
ABANDONED_SECONDS = 600.0  # a learner that was killed is started again sooner than that


def weights_directory(config: Config, run_dir: RunDir, nbytes: int) -> Path:
    """This run's own folder in `weights.directory`; else one in shared memory, if there is room for the versions kept;
    else RUN/weights."""
    name = f"slipstream-{hashlib.blake2b(str(run_dir.root.resolve()).encode(), digest_size=8).hexdigest()}"
    if config.weights.directory:
        return Path(config.weights.directory) / name
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > (KEPT + 1) * nbytes:
        return SHARED_MEMORY / name
    return run_dir.weights


class Publisher:
    """Versions in `directory`. What an earlier learner of the run left there goes as new versions come."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.temporary = SHARED_MEMORY in directory.parents
        directory.mkdir(parents=True, exist_ok=True)
        self._lock: IO[str] | None = None
        if self.temporary:
            self._lock = (directory / LOCK).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_SH)  # held as long as this process lives, whatever ends it
            _sweep(SHARED_MEMORY)
        for draft in directory.glob("*.draft"):
            draft.unlink()
        self._files = sorted(directory.glob("v*.safetensors"))  # those that go first, first

    def publish(self, version: int, tensors: dict[str, torch.Tensor]) -> Weights:
        """Write version `version`; older ones than the last few go."""
        cpu = as_published(tensors)
        path = self._directory / f"v{version:08d}.safetensors"
        draft = path.with_suffix(".draft")
        save_file(cpu, draft)
        draft.rename(path)
        self._files = [file for file in self._files if file != path] + [path]
        while len(self._files) > KEPT:
            self._files.pop(0).unlink(missing_ok=True)
        return Weights(
            version=version,
            location=str(path),
            checksum=checksum(cpu),
            tensors=[TensorInfo(name, "float32", list(tensor.shape)) for name, tensor in cpu.items()],
        )

    def close(self) -> None:
        if self._lock is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._lock.close()


def as_published(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is written, and what the checksum is of."""
    return {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in tensors.items()}


def _sweep(parent: Path) -> None:
    """Remove folders of learners that are gone and that nobody started again. Only what bears our lock is ours."""
    for lock in parent.glob(f"slipstream-*/{LOCK}"):
        with contextlib.suppress(OSError):  # another user's, still locked, or just removed by someone else
            newest = max(path.stat().st_mtime for path in (lock.parent, *lock.parent.iterdir()))
            if time.time() - newest < ABANDONED_SECONDS:
                continue
            with lock.open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)
