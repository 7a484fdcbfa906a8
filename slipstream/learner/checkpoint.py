"""Checkpoints of the learner: model, optimizer, version, random state, in torch.distributed.checkpoint's format.

Invariant: a checkpoint is found only when it is whole: a folder is written aside, synced, and renamed into place. A
kill while saving leaves the one before. The last few are kept; one that is damaged is passed over, and set aside.

Each rank writes its shards and reads what is its own, of however many ranks wrote. The version says the rest: the
learning rate is a function of it, and so is the place in the ledger, which hands out again whatever later versions
consumed.
"""

import logging
import os
import pickle
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as read_state
from torch.distributed.checkpoint.state_dict_saver import save as write_state

from slipstream.learner.optimizer import Optimizer
from slipstream.learner.policy import Policy

log = logging.getLogger(__name__)
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # for a learner that is alone, as it should

# Whatever reading makes of files that are cut, empty, or another's.
UNREADABLE = (
    *(OSError, RuntimeError, EOFError, ValueError, KeyError, IndexError, AttributeError, ImportError),
    *(pickle.UnpicklingError, zipfile.BadZipFile, struct.error, CheckpointException),
)

State = dict[str, torch.Tensor]  # by names that say where each belongs; of a sharded one, this rank's part


class Saver:
    """Writes one checkpoint at a time, in a thread of its own, from a copy: training goes on meanwhile.

    A disk that does not take one costs an error line: what was on disk stays, and the next one is tried.
    """

    def __init__(self, folder: Path, keep: int, group: Any = None, first: bool = True) -> None:
        """Of several ranks: a process `group` that nobody else uses, and whether this is the first of them."""
        self._folder, self._keep, self._group, self._first = folder, keep, group, first
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._version = 0  # that is being written
        self._new = False

    def save(self, version: int, policy: Policy, optimizer: Optimizer) -> None:
        """Returns when the state is copied. The one before is waited for, so that there is one copy at most."""
        self.wait()
        state = snapshot(version, policy, optimizer)
        self._version = version
        self._writing = self._thread.submit(write, self._folder, state, self._keep, self._group, self._first)

    def final(self) -> int | None:
        """After a checkpoint was written, once: the version that all there is to go back to contains, the start model
        included as long as fewer than `keep` are there. None when there is nothing new."""
        if self._writing is not None and self._writing.done():
            self.wait()
        new, self._new = self._new, False
        there = whole(self._folder)
        return version_of(there[0]) if new and len(there) >= self._keep else None

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        error = writing.exception()
        if isinstance(error, OSError):
            log.error(
                "checkpoint of version %d was not written: %s; make room at %s", self._version, error, self._folder
            )
            return
        writing.result()
        self._new = True

    def close(self) -> None:
        self._thread.shutdown()


def snapshot(version: int, policy: Policy, optimizer: Optimizer) -> State:
    """A copy in main memory, which later steps do not touch."""
    return DefaultStager(StagingOptions(False, False, False, False)).stage(_state(version, policy, optimizer))  # pyright: ignore[reportReturnType]


def _state(version: int, policy: Policy, optimizer: Optimizer) -> State:
    state = {"version": torch.tensor(version), "rng": torch.get_rng_state()}
    if policy.device.type == "cuda":
        state["rng_cuda"] = torch.cuda.get_rng_state(policy.device)
    state |= {f"model.{name}": tensor for name, tensor in policy.parts().items()}
    return state | {f"optimizer.{name}": tensor for name, tensor in optimizer.state().items()}


def write(folder: Path, state: State, keep: int, group: Any = None, first: bool = True) -> None:
    """Whole under its name, or not at all; the newest `keep` stay. By all ranks of `group`. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"v{int(state['version']):08d}"
    draft = folder / f".{name}"
    try:
        write_state(state, storage_writer=FileSystemWriter(draft), process_group=group, no_dist=group is None)  # pyright: ignore[reportArgumentType]
    except CheckpointException as error:
        if first:
            shutil.rmtree(draft, ignore_errors=True)
        raise _cause(error) from error
    if not first:
        return
    _sync_folder(draft)
    shutil.rmtree(folder / name, ignore_errors=True)  # of a learner that went back behind it
    draft.rename(folder / name)
    _sync_folder(folder)
    for old in whole(folder)[:-keep]:
        shutil.rmtree(old)


def _cause(error: CheckpointException) -> Exception:
    """The OSError in it; torch reports a disk that is full as a RuntimeError, and that one as its cause or context."""
    for failure, _ in error.failures.values():
        for each in (failure, failure.__cause__, failure.__context__):
            if isinstance(each, OSError):
                return each
    return RuntimeError(f"a checkpoint was not written: {error}")


def load_newest(folder: Path, load: Callable[[Path], int]) -> int:
    """`load` the newest checkpoint that can be read; its version, 0 when there is none."""
    for abandoned in folder.glob(".v*"):
        shutil.rmtree(abandoned)  # half written when the learner was killed
    for path in reversed(whole(folder)):
        try:
            version = load(path)
        except UNREADABLE as error:
            log.warning("checkpoint %s cannot be read, trying the one before: %s", path.name, error)
            shutil.rmtree(path.with_suffix(".damaged"), ignore_errors=True)
            path.rename(path.with_suffix(".damaged"))
            continue
        log.info("resumes from %s, version %d", path.name, version)
        return version
    return 0


def load(path: Path, policy: Policy, optimizer: Optimizer, group: Any = None) -> int:
    """Its version. By all ranks of `group`. Raises UNREADABLE, and then nothing has changed."""
    reader = FileSystemReader(path)
    there = reader.read_metadata().state_dict_metadata
    moments = [name.removeprefix("optimizer.") for name in there if name.startswith("optimizer.")]
    state = {"version": torch.tensor(0), "rng": torch.get_rng_state()}
    if "rng_cuda" in there and policy.device.type == "cuda":
        state["rng_cuda"] = torch.cuda.get_rng_state(policy.device)
    state |= {f"model.{name}": torch.zeros_like(tensor) for name, tensor in policy.parts().items()}
    state |= {f"optimizer.{name}": tensor for name, tensor in optimizer.blank(moments).items()}
    read_state(state, storage_reader=reader, process_group=group, no_dist=group is None)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        for name, tensor in policy.parts().items():
            tensor.copy_(state[f"model.{name}"])
    optimizer.load({name: state[f"optimizer.{name}"] for name in moments})
    torch.set_rng_state(state["rng"])
    if "rng_cuda" in state:
        torch.cuda.set_rng_state(state["rng_cuda"], policy.device)
    return int(state["version"])


def whole(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(path for path in folder.glob("v*") if path.name[1:].isdecimal())


def version_of(path: Path) -> int:
    return int(path.name.removeprefix("v"))


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
