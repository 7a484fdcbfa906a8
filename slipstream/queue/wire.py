"""Trajectories as Arrow: one record batch a delivery, one row a trajectory, list columns for the per-token fields.

Invariant: `decode(encode(trajectories))` has every field of every trajectory, and the values of a list column are the
packed token array while its offsets are cu_seqlens: nothing on the way holds Python lists of tokens.
"""

# pyarrow has no types.
# pyright: standard, reportMissingTypeStubs=false

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from slipstream.queue.row import Row
from slipstream.trajectory import Outcome, SpanKind, Trajectory, VersionRun

Buffer: TypeAlias = Any  # pyarrow.Buffer, or another object with the buffer protocol
RecordBatch: TypeAlias = Any  # pyarrow.RecordBatch

SCHEMA_VERSION = "1"

SCHEMA = pa.schema(
    [
        pa.field("lease", pa.uint64()),
        pa.field("group", pa.uint64()),
        pa.field("task", pa.string()),
        pa.field("attempt", pa.uint16()),
        pa.field("token_ids", pa.list_(pa.int32())),
        pa.field("sampled", pa.list_(pa.bool_())),
        pa.field("logprobs", pa.list_(pa.float32())),
        pa.field("version_runs", pa.list_(pa.struct([("length", pa.uint32()), ("version", pa.int32())]))),
        pa.field(
            "spans",
            pa.list_(
                pa.struct(
                    [("kind", pa.uint8()), ("turn", pa.uint16()), ("start", pa.uint32()), ("length", pa.uint32())]
                )
            ),
        ),
        pa.field("reward", pa.float64()),
        pa.field("reward_parts", pa.map_(pa.string(), pa.float64())),
        pa.field("outcome", pa.string()),
        pa.field("turns", pa.int32()),
        pa.field("tool_calls", pa.int32()),
        pa.field("tool_errors", pa.int32()),
        *(pa.field(name, pa.float64()) for name in ("t_leased", "t_first_token", "t_done")),
        *(pa.field(name, pa.float64()) for name in ("s_generate", "s_tool", "s_wait")),
        pa.field("detail", pa.binary()),
    ],
    metadata={"slipstream.schema": SCHEMA_VERSION},
)
NULLABLE = {"reward", "detail"}
SPAN_KINDS = list(SpanKind)
OUTCOMES = [outcome.value for outcome in Outcome]
# Columns built from plain values; the others have a shape of their own.
_SHAPED = {"token_ids", "sampled", "logprobs", "version_runs", "spans", "outcome", "reward_parts"}
_SCALARS = [field.name for field in SCHEMA if field.name not in _SHAPED]


class Malformed(Exception):
    """Bytes that are no trajectories of ours; says what is wrong with them."""


def encode(trajectories: Sequence[Trajectory]) -> list[Buffer]:
    """Frames for the wire. Per-token buffers are wrapped, not copied, until they are written out."""
    columns: dict[str, Any] = {name: [getattr(t, name) for t in trajectories] for name in _SCALARS}
    columns["outcome"] = [t.outcome.value for t in trajectories]
    columns["reward_parts"] = [list(t.reward_parts.items()) for t in trajectories]
    columns["token_ids"] = _lists([np.frombuffer(t.token_ids, np.int32) for t in trajectories], np.int32)
    columns["sampled"] = _lists([np.frombuffer(t.sampled, np.bool_) for t in trajectories], np.bool_)
    columns["logprobs"] = _lists([np.frombuffer(t.logprobs, np.float32) for t in trajectories], np.float32)
    columns["version_runs"] = [
        [{"length": r.length, "version": r.version} for r in t.version_runs] for t in trajectories
    ]
    columns["spans"] = [
        [{"kind": SPAN_KINDS.index(s.kind), "turn": s.turn, "start": s.start, "length": s.length} for s in t.spans]
        for t in trajectories
    ]
    arrays = [
        value if isinstance(value := columns[field.name], pa.Array) else pa.array(value, field.type) for field in SCHEMA
    ]
    return [_written(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))]


def _written(batch: RecordBatch) -> Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _lists(pieces: list[np.ndarray], dtype: Any) -> pa.ListArray:
    offsets = np.zeros(len(pieces) + 1, np.int32)
    np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
    values = pieces[0] if len(pieces) == 1 else np.concatenate(pieces) if pieces else np.zeros(0, dtype)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def decode(frames: Sequence[Any]) -> RecordBatch:
    """The record batch of one delivery, over the frames' memory. Raises Malformed."""
    if len(frames) != 1:
        raise Malformed(f"{len(frames)} frames; a delivery has one")
    try:
        with pa.ipc.open_stream(pa.py_buffer(frames[0])) as reader:
            _check_schema(reader.schema)
            batches = list(reader)
        if len(batches) != 1:
            raise Malformed(f"{len(batches)} record batches; a delivery has one")
        batches[0].validate(full=True)
    except (pa.ArrowException, OSError, ValueError, OverflowError, TypeError) as error:
        raise Malformed(f"not Arrow IPC: {error}") from error
    _check_rows(batches[0])
    return batches[0]


def _check_schema(schema: pa.Schema) -> None:
    version = (schema.metadata or {}).get(b"slipstream.schema", b"none").decode(errors="replace")
    if version != SCHEMA_VERSION:
        raise Malformed(
            f"schema version {version}; this reader knows {SCHEMA_VERSION}: use the same slipstream on both sides"
        )
    if not schema.equals(SCHEMA, check_metadata=False):
        raise Malformed(f"columns differ from those of schema version {SCHEMA_VERSION}")


def _check_rows(batch: RecordBatch) -> None:
    """What Arrow cannot know: per-token columns agree in length, version runs cover the stream."""
    for field in SCHEMA:
        if field.name not in NULLABLE and batch.column(field.name).null_count:
            raise Malformed(f"column {field.name} has nulls")
    columns = [batch.column(name) for name in ("token_ids", "sampled", "logprobs")]
    runs = batch.column("version_runs")
    if any(each.flatten().null_count for each in (*columns, runs)) or any(
        runs.flatten().field(name).null_count for name in ("length", "version")
    ):
        raise Malformed("a token has nulls")
    lengths = [each.value_lengths().to_numpy(zero_copy_only=False) for each in columns]
    if not all(np.array_equal(lengths[0], each) for each in lengths[1:]):
        raise Malformed("token_ids, sampled and logprobs differ in length")
    if not np.array_equal(_sums(runs, runs.flatten().field("length").to_numpy()), lengths[0]):
        raise Malformed("version runs do not cover the stream")
    if not np.array_equal(versions(batch) >= 0, columns[1].flatten().to_numpy(zero_copy_only=False)):
        raise Malformed("version runs name a version where nothing was sampled, or none where something was")
    for outcome in batch.column("outcome").to_pylist():
        if outcome not in OUTCOMES:
            raise Malformed(f"outcome {outcome!r} is not one of {', '.join(OUTCOMES)}")


def _sums(lists: pa.ListArray, values: np.ndarray) -> np.ndarray:
    """Of each list's values, which lie one behind the other in `values`."""
    ends = np.cumsum(lists.value_lengths().to_numpy(zero_copy_only=False))
    totals = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    return np.diff(totals[np.concatenate([[0], ends])])


def versions(batch: RecordBatch) -> np.ndarray:
    """The version of every token, -1 where not sampled: int32 [T]."""
    runs = batch.column("version_runs").flatten()
    return np.repeat(runs.field("version").to_numpy(), runs.field("length").to_numpy())


def split(batch: RecordBatch) -> list[Buffer]:
    """One frame a row, as if each trajectory had been delivered alone."""
    return [_written(batch.slice(row, 1)) for row in range(batch.num_rows)]


def rows(batch: RecordBatch) -> list[Row]:
    """What the ledger needs to know of each trajectory."""
    columns = (batch.column(name).to_pylist() for name in ("lease", "group", "task", "attempt", "outcome", "reward"))
    of_tokens = versions(batch)
    ends = np.cumsum(batch.column("token_ids").value_lengths().to_numpy(zero_copy_only=False))
    found: list[Row] = []
    for part, (lease, group, task, attempt, outcome, reward) in zip(
        np.split(of_tokens, ends[:-1]), zip(*columns, strict=True), strict=False
    ):
        names, counts = np.unique(part[part >= 0], return_counts=True)
        of_versions = [VersionRun(count, name) for name, count in zip(names.tolist(), counts.tolist(), strict=True)]
        found.append(Row(lease, group, task, attempt, int(counts.sum()), of_versions, Outcome(outcome), reward))
    return found
