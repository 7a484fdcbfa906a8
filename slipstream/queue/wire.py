"""Trajectories as Arrow: one record batch a delivery, one row a trajectory, list columns for the per-token fields.

Invariant: `decode(encode(trajectories))` has every field of every trajectory, and the values of a list column are the
packed token array while its offsets are cu_seqlens: nothing on the way holds Python lists of tokens.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from slipstream.trajectory import Outcome, SpanKind, Trajectory

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
SPAN_KINDS = list(SpanKind)
# Columns built from plain values; the others have a shape of their own.
_SHAPED = {"token_ids", "sampled", "logprobs", "version_runs", "spans", "outcome", "reward_parts"}
_SCALARS = [field.name for field in SCHEMA if field.name not in _SHAPED]


class Malformed(Exception):
    """Bytes that are no trajectories of ours; says what is wrong with them."""


def encode(trajectories: Sequence[Trajectory]) -> list[pa.Buffer]:
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
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))
    return [sink.getvalue()]


def _lists(pieces: list[np.ndarray], dtype: Any) -> pa.ListArray:
    offsets = np.zeros(len(pieces) + 1, np.int32)
    np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
    values = pieces[0] if len(pieces) == 1 else np.concatenate(pieces) if pieces else np.zeros(0, dtype)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def decode(frames: Sequence[Any]) -> pa.RecordBatch:
    """The record batch of one delivery, over the frames' memory. Raises Malformed."""
    if len(frames) != 1:
        raise Malformed(f"{len(frames)} frames; a delivery has one")
    try:
        with pa.ipc.open_stream(pa.py_buffer(frames[0])) as reader:
            _check_schema(reader.schema)
            batch = reader.read_next_batch()
        batch.validate(full=True)
    except StopIteration as error:
        raise Malformed("no record batch in it") from error
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise Malformed(f"not Arrow IPC: {error}") from error
    _check_rows(batch)
    return batch


def _check_schema(schema: pa.Schema) -> None:
    version = (schema.metadata or {}).get(b"slipstream.schema", b"none").decode(errors="replace")
    if version != SCHEMA_VERSION:
        raise Malformed(
            f"schema version {version}; this reader knows {SCHEMA_VERSION}: use the same slipstream on both sides"
        )
    if not schema.equals(SCHEMA, check_metadata=False):
        raise Malformed("columns differ from those of schema version 1")


def _check_rows(batch: pa.RecordBatch) -> None:
    """What Arrow cannot know: per-token columns agree in length, and version runs cover the stream."""
    offsets = [batch.column(name).offsets.to_numpy() for name in ("token_ids", "sampled", "logprobs")]
    lengths = [np.diff(each) for each in offsets]
    if not all(np.array_equal(lengths[0], each) for each in lengths[1:]):
        raise Malformed("token_ids, sampled and logprobs differ in length")
    for name in ("token_ids", "sampled", "logprobs", "version_runs", "outcome"):
        if batch.column(name).null_count:
            raise Malformed(f"column {name} has nulls")
    runs = batch.column("version_runs")
    starts = runs.offsets.to_numpy()
    covered = np.concatenate(
        [[0], np.cumsum(runs.values.field("length").to_numpy(zero_copy_only=False), dtype=np.int64)]
    )
    if not np.array_equal(covered[starts[1:]] - covered[starts[:-1]], lengths[0]):
        raise Malformed("version runs do not cover the stream")
    known = {outcome.value for outcome in Outcome}
    for outcome in batch.column("outcome").to_pylist():
        if outcome not in known:
            raise Malformed(f"outcome {outcome!r} is not one of {', '.join(sorted(known))}")


class Row(msgspec.Struct, frozen=True):
    """What the ledger needs of a delivered trajectory."""

    lease: int
    tokens: int  # sampled
    outcome: Outcome
    reward: float | None


def rows(batch: pa.RecordBatch) -> list[Row]:
    sampled = batch.column("sampled")
    offsets = sampled.offsets.to_numpy()
    counts = np.concatenate([[0], np.cumsum(sampled.values.to_numpy(zero_copy_only=False), dtype=np.int64)])
    tokens = counts[offsets[1:]] - counts[offsets[:-1]]
    leases, rewards = batch.column("lease").to_pylist(), batch.column("reward").to_pylist()
    outcomes = batch.column("outcome").to_pylist()
    return [
        Row(lease, int(count), Outcome(outcome), reward)
        for lease, count, outcome, reward in zip(leases, tokens, outcomes, rewards, strict=True)
    ]
