"""Checkpoints of the learner: model, optimizer, version, random state.

Invariant: a checkpoint is found only when it is whole: it is written aside, synced, and renamed into place. A kill
while saving leaves the one before. The last two are kept; one that is damaged is passed over, and set aside.
"""

import logging
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import torch

from slipstream.learner.optimizer import Optimizer
from slipstream.learner.policy import Policy

log = logging.getLogger(__name__)

KEPT = 2
UNREADABLE = (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile)


def save(folder: Path, version: int, policy: Policy, optimizer: Optimizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".v{version:08d}.{os.getpid()}"
    state = {
        "version": version,
        "model": policy.model.state_dict(),
        "optimizer": optimizer.state(),
        "rng": torch.get_rng_state(),
    }
    with draft.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(folder / f"v{version:08d}.pt")
    _sync_folder(folder)
    for old in whole(folder)[:-KEPT]:
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
        policy.model.load_state_dict(state["model"])
        optimizer.load(state["optimizer"])
        torch.set_rng_state(state["rng"].cpu())
        log.info("resumes from %s, version %d", path.name, state["version"])
        return state["version"]
    return 0


def export(folder: Path, policy: Policy, tokenizer_from: str) -> None:
    """An ordinary Hugging Face folder with the tokenizer and template trained on."""
    draft = folder.with_name(f".{folder.name}")
    shutil.rmtree(draft, ignore_errors=True)
    policy.save(draft, tokenizer_from)
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)


def whole(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(folder.glob("v*.pt"))


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
