"""What a step made of each token, on disk: RUN/steps/vNNNNNNNN.arrow, for the viewer.

Invariant: a file holds one step whole, or is not there; a step made again replaces the first. One row a trajectory that
was forwarded; lists run over its sampled tokens, in the order of the stream.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import numpy as np

COLUMNS = ("logprobs", "weights", "kept")


class StepTokens(msgspec.Struct, frozen=True):
    """Of all trajectories of a step, packed; NaN for a token whose log-prob was not computed (it was too old)."""

    leases: "np.ndarray"  # int64 [N]
    advantages: "np.ndarray"  # float64 [N]
    bounds: "np.ndarray"  # int32 [N+1], over the sampled tokens
    logprobs: "np.ndarray"  # float32 [S]: the learner's, before the step
    weights: "np.ndarray"  # float32 [S]: the correction's
    kept: "np.ndarray"  # bool [S]: in the loss


class Learnt(msgspec.Struct, frozen=True):
    """Of one trajectory."""

    advantage: float
    logprobs: "np.ndarray"
    weights: "np.ndarray"
    kept: "np.ndarray"


def step_path(folder: Path, version: int) -> Path:
    return folder / f"v{version:08d}.arrow"


def write_step(folder: Path, version: int, tokens: StepTokens) -> None:
    """Raises OSError, with nothing left behind, when the disk takes it not."""
    import numpy as np
    import pyarrow as pa

    offsets = pa.array(tokens.bounds.astype(np.int32))
    lists = [pa.ListArray.from_arrays(offsets, pa.array(getattr(tokens, name))) for name in COLUMNS]
    arrays = [pa.array(tokens.leases), pa.array(tokens.advantages), *lists]
    batch = pa.RecordBatch.from_arrays(arrays, names=["lease", "advantage", *COLUMNS])
    path = step_path(folder, version)
    draft = path.with_suffix(".new")
    try:
        folder.mkdir(exist_ok=True)
        with pa.OSFile(str(draft), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def read_step(folder: Path, version: int) -> dict[int, Learnt]:
    """By lease; empty when it was not recorded, or is not readable."""
    import pyarrow as pa

    path = step_path(folder, version)
    try:
        with pa.OSFile(str(path)) as file:
            batch: Any = pa.ipc.open_file(file).get_batch(0)
    except (OSError, pa.ArrowException):
        return {}
    lists: Iterable[Any] = zip(*(batch.column(name) for name in COLUMNS), strict=True)
    return {
        lease: Learnt(advantage, *(each.values.to_numpy(zero_copy_only=False) for each in of_tokens))
        for lease, advantage, of_tokens in zip(
            batch.column("lease").to_pylist(), batch.column("advantage").to_pylist(), lists, strict=True
        )
    }
