"""Checkpoints of the learner: model, optimizer, version, random state.

Invariant: a checkpoint is found only when it is whole: it is written aside, synced, and renamed into place. A kill
while saving leaves the one before. The last few are kept; one that is damaged is passed over, and set aside.

The version says the rest: the learning rate is a function of it, and so is the place in the ledger, which hands out
again whatever later versions consumed.
"""

import logging
import os
import pickle
import struct
import zipfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from slipstream.learner.optimizer import Optimizer
from slipstream.learner.policy import Policy

log = logging.getLogger(__name__)

# Whatever torch.load makes of a file that is cut, empty, or another's.
UNREADABLE = (
    *(OSError, RuntimeError, EOFError, ValueError, KeyError),
    *(pickle.UnpicklingError, zipfile.BadZipFile, struct.error),
)

State = dict[str, Any]  # as torch.save writes it


class Saver:
    """Writes one checkpoint at a time, in a thread of its own, from a copy: training goes on meanwhile.

    A disk that does not take one costs an error line: what was on disk stays, and the next one is tried.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._version = 0  # that is being written
        self._new = False

    def save(self, version: int, policy: Policy, optimizer: Optimizer) -> None:
        """Returns when the state is copied. The one before is waited for, so that there is one copy at most."""
        self.wait()
        state = snapshot(version, policy, optimizer)
        self._version = version
        self._writing = self._thread.submit(write, self._folder, state, self._keep)

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
    state: State = {
        "version": version,
        "model": policy.model.state_dict(),
        "optimizer": optimizer.state(),
        "rng": torch.get_rng_state(),
    }
    if policy.device.type == "cuda":
        state["rng_cuda"] = torch.cuda.get_rng_state(policy.device)
    return _copied(state, {})


def write(folder: Path, state: State, keep: int) -> None:
    """Whole under its name, or not at all; the newest `keep` stay. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    version: int = state["version"]
    draft = folder / f".v{version:08d}.{os.getpid()}"
    try:
        with draft.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        draft.unlink(missing_ok=True)
        # torch reports a disk that is full as a RuntimeError, and the OSError as its cause or context.
        cause = error.__cause__ or error.__context__
        if isinstance(error, RuntimeError) and isinstance(cause, OSError):
            raise cause from error
        raise
    draft.rename(folder / f"v{version:08d}.pt")
    _sync_folder(folder)
    for old in whole(folder)[:-keep]:
        old.unlink()


def load_newest(folder: Path, policy: Policy, optimizer: Optimizer) -> int:
    """Restore the newest checkpoint that can be read; its version, 0 when there is none."""
    for abandoned in folder.glob(".v*"):
        abandoned.unlink()  # half written when the learner was killed
    for path in reversed(whole(folder)):
        try:
            state = torch.load(path, map_location=policy.device, weights_only=True)
        except UNREADABLE as error:
            log.warning("checkpoint %s cannot be read, trying the one before: %s", path.name, error)
            path.rename(path.with_suffix(".damaged"))
            continue
        restore(state, policy, optimizer)
        log.info("resumes from %s, version %d", path.name, state["version"])
        return state["version"]
    return 0


def restore(state: State, policy: Policy, optimizer: Optimizer) -> None:
    policy.model.load_state_dict(state["model"])
    optimizer.load(state["optimizer"])
    torch.set_rng_state(state["rng"].cpu())
    if "rng_cuda" in state and policy.device.type == "cuda":
        torch.cuda.set_rng_state(state["rng_cuda"].cpu(), policy.device)


def whole(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(folder.glob("v*.pt"))


def version_of(path: Path) -> int:
    return int(path.stem.removeprefix("v"))


def _copied(value: Any, seen: dict[int, torch.Tensor]) -> Any:
    """Tensors that share memory (a tied head) still do in the copy, and are written once."""
    if isinstance(value, torch.Tensor):
        if value.data_ptr() not in seen or seen[value.data_ptr()].shape != value.shape:
            seen[value.data_ptr()] = value.detach().to("cpu", copy=True)
        return seen[value.data_ptr()]
    if isinstance(value, dict):
        return {key: _copied(inside, seen) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(inside, seen) for inside in value]
    return value


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
