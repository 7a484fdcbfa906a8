"""Trajectories as Arrow: one record batch a delivery, one row a trajectory, list columns for the per-token fields.

Invariant: `decode(encode(trajectories))` has every field of every trajectory, and the values of a list column are the
packed token array while its offsets are cu_seqlens: nothing on the way holds Python lists of tokens.
"""

# pyarrow has no types.
# pyright: standard, reportMissingTypeStubs=false

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from slipstream.queue.row import Row
from slipstream.trajectory import Outcome, Span, SpanKind, Trajectory, VersionRun

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
TYPES = {field.name: field.type for field in SCHEMA}
MUST_BE = [i for i, field in enumerate(SCHEMA) if field.name not in ("reward", "detail")]  # columns without nulls
SPAN_KINDS = list(SpanKind)
SPAN_NUMBERS = {kind: number for number, kind in enumerate(SPAN_KINDS)}
OUTCOMES = {outcome.value for outcome in Outcome}
_NUMBERS = {  # columns with one number a trajectory
    "lease": np.uint64,
    "group": np.uint64,
    "attempt": np.uint16,
    **dict.fromkeys(("turns", "tool_calls", "tool_errors"), np.int32),
    **dict.fromkeys(("t_leased", "t_first_token", "t_done", "s_generate", "s_tool", "s_wait"), np.float64),
}
# A stream is the schema, one record batch, and an end: the first and last are the same in every frame of ours.
_BEGIN: bytes = SCHEMA.serialize().to_pybytes()
_END = b"\xff\xff\xff\xff\0\0\0\0"


class Malformed(Exception):
    """Bytes that are no trajectories of ours; says what is wrong with them."""


# -- writing -------------------------------------------------------------------------------------------------------


def encode(trajectories: Sequence[Trajectory]) -> list[Buffer]:
    """Frames for the wire. Per-token buffers are wrapped, not copied, until they are written out."""
    columns: dict[str, pa.Array] = {}
    for name, dtype in _NUMBERS.items():
        columns[name] = _numbers(np.array([getattr(t, name) for t in trajectories], dtype), TYPES[name])
    for name in ("task", "outcome", "reward", "detail"):
        columns[name] = pa.array([getattr(t, name) for t in trajectories], TYPES[name])
    columns["reward_parts"] = pa.array([list(t.reward_parts.items()) for t in trajectories], TYPES["reward_parts"])
    for name, dtype in (("token_ids", np.int32), ("logprobs", np.float32)):
        values = _joined([np.frombuffer(getattr(t, name), dtype) for t in trajectories], dtype)
        columns[name] = _lists(name, [len(getattr(t, name)) for t in trajectories], _numbers(values))
    sampled = _joined([np.frombuffer(t.sampled, np.bool_) for t in trajectories], np.bool_)
    columns["sampled"] = _lists("sampled", [len(t.sampled) for t in trajectories], _bits(sampled))
    runs = [run for t in trajectories for run in t.version_runs]
    fields = [[run.length for run in runs], [run.version for run in runs]]
    columns["version_runs"] = _records("version_runs", [len(t.version_runs) for t in trajectories], fields)
    spans = [span for t in trajectories for span in t.spans]
    kinds = [SPAN_NUMBERS[span.kind] for span in spans]
    fields = [kinds, [span.turn for span in spans], [span.start for span in spans], [span.length for span in spans]]
    columns["spans"] = _records("spans", [len(t.spans) for t in trajectories], fields)
    return [_written(pa.RecordBatch.from_arrays([columns[field.name] for field in SCHEMA], schema=SCHEMA))]


def _written(batch: RecordBatch) -> Buffer:
    return pa.py_buffer(b"".join([_BEGIN, batch.serialize(), _END]))


# `pa.array` looks at every value, and for pandas; these take the memory as it is.


def _numbers(values: np.ndarray, kind: Any = None) -> pa.Array:
    return pa.Array.from_buffers(kind or pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def _bits(values: np.ndarray) -> pa.Array:
    bits = np.packbits(values, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(bits)])


def _joined(pieces: list[np.ndarray], dtype: Any) -> np.ndarray:
    return pieces[0] if len(pieces) == 1 else np.concatenate([*pieces, np.zeros(0, dtype)])


def _lists(column: str, lengths: list[int], values: pa.Array) -> pa.ListArray:
    offsets = pa.py_buffer(np.array([0, *accumulate(lengths)], np.int32))
    return pa.Array.from_buffers(TYPES[column], len(lengths), [None, offsets], children=[values])


def _records(column: str, lengths: list[int], fields: list[list[int]]) -> pa.ListArray:
    """Lists of structs of integers, from one list for each of a struct's fields."""
    kind = TYPES[column].value_type
    arrays = [
        _numbers(np.array(values, kind.field(i).type.to_pandas_dtype()), kind.field(i).type)
        for i, values in enumerate(fields)
    ]
    return _lists(column, lengths, pa.Array.from_buffers(kind, len(fields[0]), [None], children=arrays))


# -- reading -------------------------------------------------------------------------------------------------------


def decode(frames: Sequence[Any]) -> RecordBatch:
    """The record batch of one delivery, over the frames' memory. Raises Malformed."""
    batch = read(frames)
    try:
        batch.validate(full=True)
        _check_rows(batch)
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise Malformed(f"not Arrow IPC: {error}") from error
    return batch


def read(frames: Sequence[Any]) -> RecordBatch:
    """`decode` of what the queue has taken already: it looked at every row. Raises Malformed."""
    if len(frames) != 1:
        raise Malformed(f"{len(frames)} frames; a delivery has one")
    buffer = pa.py_buffer(frames[0])
    try:
        # Most begin with this very schema. Else Arrow reads it, and one that is equal will do.
        if buffer.size > len(_BEGIN) and buffer.slice(0, len(_BEGIN)).equals(pa.py_buffer(_BEGIN)):
            return _one_batch(pa.BufferReader(buffer.slice(len(_BEGIN))))
        with pa.ipc.open_stream(buffer) as reader:
            _check_schema(reader.schema)
            batches = list(reader)
    except (pa.ArrowException, OSError, ValueError, OverflowError, TypeError) as error:
        raise Malformed(f"not Arrow IPC: {error}") from error
    if len(batches) != 1:
        raise Malformed(f"{len(batches)} record batches; a delivery has one")
    return batches[0]


def _one_batch(reader: Any) -> RecordBatch:
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(reader), SCHEMA)
    if reader.read(len(_END)) not in (_END, b""):
        raise Malformed("more than one record batch; a delivery has one")
    return batch


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
    for number in MUST_BE:
        if batch.column(number).null_count:
            raise Malformed(f"column {SCHEMA.field(number).name} has nulls")
    ids, sampled, logprobs = (batch.column(name) for name in ("token_ids", "sampled", "logprobs"))
    runs = flat(batch.column("version_runs"))
    lengths, names = runs.field("length"), runs.field("version")
    if any(each.null_count for each in (flat(ids), flat(sampled), flat(logprobs), runs, lengths, names)):
        raise Malformed("a token has nulls")
    ends = _ends(ids)
    if not (np.array_equal(ends, _ends(sampled)) and np.array_equal(ends, _ends(logprobs))):
        raise Malformed("token_ids, sampled and logprobs differ in length")
    covered = np.concatenate([[0], np.cumsum(lengths.to_numpy(), dtype=np.int64)])
    if not np.array_equal(covered[_ends(batch.column("version_runs"))], ends):
        raise Malformed("version runs do not cover the stream")
    of_model = bits(sampled)
    if not np.array_equal(np.repeat(names.to_numpy() >= 0, lengths.to_numpy()), of_model):
        raise Malformed("version runs name a version where nothing was sampled, or none where something was")
    _check_branches(batch, of_model)
    for outcome in batch.column("outcome").to_pylist():
        if outcome not in OUTCOMES:
            raise Malformed(f"outcome {outcome!r} is not one of {', '.join(sorted(OUTCOMES))}")


def _check_branches(batch: RecordBatch, sampled: np.ndarray) -> None:
    """Each begins inside its own row, behind the one before, with a token that was not sampled."""
    kinds = flat(batch.column("spans")).field("kind").to_numpy()
    if (kinds >= len(SPAN_KINDS)).any():
        raise Malformed(f"a span is of kind {kinds.max()}; there are {len(SPAN_KINDS)} kinds")
    begins, within, length = _branch_places(batch)
    if ((within < 1) | (within >= length)).any() or (np.diff(begins) < 1).any() or sampled[begins].any():
        raise Malformed("a branch does not begin inside its stream, behind the one before, with a token of a prompt")


def branch_begins(batch: RecordBatch) -> np.ndarray:
    """Where in the packed tokens branches begin that are not the first of their row: int64 [B]."""
    return _branch_places(batch)[0]


def _branch_places(batch: RecordBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every branch that is not the first of its row: where it begins in the packed tokens and in its own row, and
    the length of that row."""
    column = batch.column("spans")
    spans = flat(column)
    found = np.flatnonzero(spans.field("kind").to_numpy() == SPAN_NUMBERS[SpanKind.BRANCH])
    if not len(found):
        return found, found, found
    row = np.searchsorted(_ends(column), found, side="right")
    within = spans.field("start").to_numpy()[found].astype(np.int64)
    ends = _ends(batch.column("token_ids")).astype(np.int64)
    lengths = np.diff(ends, prepend=0)
    return (ends - lengths)[row] + within, within, lengths[row]


def flat(lists: pa.ListArray) -> pa.Array:
    """The lists' values one behind the other: what `flatten` gives where no list is null, without pyarrow.compute,
    which takes a tenth of a second to import and a tenth of a millisecond a call."""
    offsets = lists.offsets
    begin = offsets[0].as_py()
    return lists.values.slice(begin, offsets[len(lists)].as_py() - begin)


def _ends(lists: pa.ListArray) -> np.ndarray:
    """Where each list ends in the flattened column; the first begins at 0."""
    offsets = lists.offsets.to_numpy()
    return offsets[1:] - offsets[0]


def bits(lists: pa.ListArray) -> np.ndarray:
    """The flattened column of booleans: uint8 [T], 0 or 1."""
    values = flat(lists)
    begin, end = values.offset, values.offset + len(values)
    packed = np.frombuffer(values.buffers()[1] or b"", np.uint8)[begin // 8 : (end + 7) // 8]
    return np.unpackbits(packed, bitorder="little")[begin % 8 : begin % 8 + len(values)]


def versions(batch: RecordBatch) -> np.ndarray:
    """The version of every token, -1 where not sampled: int32 [T]."""
    runs = flat(batch.column("version_runs"))
    return np.repeat(runs.field("version").to_numpy(), runs.field("length").to_numpy())


def trajectory(batch: RecordBatch) -> Trajectory:
    """What `encode` was given, from its batch of one row."""
    (values,) = batch.drop_columns(["token_ids", "sampled", "logprobs", "version_runs", "spans"]).to_pylist()
    runs, spans = (batch.column(name)[0].as_py() for name in ("version_runs", "spans"))
    return Trajectory(
        **values | {"outcome": Outcome(values["outcome"]), "reward_parts": dict(values["reward_parts"])},
        token_ids=array("i", flat(batch.column("token_ids")).to_numpy().tobytes()),
        logprobs=array("f", flat(batch.column("logprobs")).to_numpy().tobytes()),
        sampled=bytearray(bits(batch.column("sampled")).tobytes()),
        version_runs=[VersionRun(run["length"], run["version"]) for run in runs],
        spans=[Span(SPAN_KINDS[s["kind"]], s["turn"], s["start"], s["length"]) for s in spans],
    )


def split(batch: RecordBatch) -> list[Buffer]:
    """One frame a row, as if each trajectory had been delivered alone."""
    return [_written(batch.slice(row, 1)) for row in range(batch.num_rows)]


def rows(batch: RecordBatch) -> list[Row]:
    """What the ledger needs to know of each trajectory."""
    columns = (batch.column(name).to_pylist() for name in ("lease", "group", "task", "attempt", "outcome", "reward"))
    runs = batch.column("version_runs")
    lengths, names = (flat(runs).field(name).to_numpy().tolist() for name in ("length", "version"))
    found: list[Row] = []
    begin = 0
    for end, (lease, group, task, attempt, outcome, reward) in zip(
        _ends(runs).tolist(), zip(*columns, strict=True), strict=True
    ):
        counts: dict[int, int] = {}
        for length, name in zip(lengths[begin:end], names[begin:end], strict=True):
            if name >= 0 and length:
                counts[name] = counts.get(name, 0) + length
        of_versions = [VersionRun(count, name) for name, count in sorted(counts.items())]
        found.append(Row(lease, group, task, attempt, sum(counts.values()), of_versions, Outcome(outcome), reward))
        begin = end
    return found
