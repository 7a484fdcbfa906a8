"""A version of a run as a folder: from its checkpoint, or made again from the one before and the recorded batches.

Invariant: what is exported is what was published under that version, or nothing is.
"""

import logging
from pathlib import Path

import msgspec

from slipstream.config import Config, RunDir
from slipstream.errors import UserError
from slipstream.learner import checkpoint
from slipstream.learner.assembly import Parts, assemble, settle_torch
from slipstream.learner.folder import write_folder
from slipstream.learner.publisher import as_published
from slipstream.learner.recording import Recording, read_recording
from slipstream.learner.replay import make_version
from slipstream.weights_file import checksum

log = logging.getLogger(__name__)


class Exported(msgspec.Struct, frozen=True):
    version: int
    checksum: str
    checked: bool  # it is what the run published; else the journal says nothing of this version


def export(config: Config, run_dir: RunDir, version: str, out: Path) -> Exported:
    """`version` of a run ("latest": its newest checkpoint) to `out`. Raises UserError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {str(out)!r}: is there already; write the name of a folder that is not")
    recording = read_recording(run_dir.journal)
    there = {checkpoint.version_of(path): path for path in checkpoint.whole(run_dir.checkpoints)}
    number = _number(version, there, recording)
    settle_torch(config)
    parts = assemble(config)
    _go_to(number, parts, there, recording, config)
    made = checksum(as_published(parts.policy.tensors()))
    published = recording.checksums.get(number, [])
    if published and made != published[-1]:
        raise UserError(
            f"--version {number}: what was made is not what the run published ({made}, not {published[-1]}); choose "
            "another, or run it on the machine that trained"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_folder(out, parts.policy, parts.computes.tensors(), Path(config.model.path))
    except OSError as error:
        raise UserError(f"--out {str(out)!r}: cannot be written: {error.strerror}; write another --out") from error
    return Exported(number, made, bool(published))


def _number(version: str, there: dict[int, Path], recording: Recording) -> int:
    if version == "latest":
        return max(there, default=0) or max(recording.batches, default=0)
    if version.isdecimal() and (int(version) in there or int(version) in {0, *recording.batches}):
        return int(version)
    last = max({0, *there, *recording.batches})
    raise UserError(f"--version {version}: the run made versions 0 to {last}; write one of them, or latest")


def _go_to(number: int, parts: Parts, there: dict[int, Path], recording: Recording, config: Config) -> None:
    """From the newest checkpoint up to `number` that can be read, or the start model."""
    reached = 0
    for version in sorted((version for version in there if version <= number), reverse=True):
        try:
            checkpoint.load(there[version], parts.policy, parts.optimizer)
        except checkpoint.UNREADABLE as error:
            log.warning("checkpoint %s cannot be read, trying the one before: %s", there[version].name, error)
            continue
        reached = version
        break
    if reached < number:
        log.info("makes versions %d to %d again from the recorded batches", reached + 1, number)
    for version in range(reached + 1, number + 1):
        if version not in recording.batches:
            raise UserError(f"--version {number}: no checkpoint and no batch of version {version} is left")
        make_version(version, recording, parts, config)
