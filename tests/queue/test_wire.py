"""What is encoded comes back whole; what is no delivery of ours is refused by name and never crashes the reader."""

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_made import make_tasks, make_trajectory

from slipstream.queue import Malformed, decode, encode, packed
from slipstream.queue.messages import Lease
from slipstream.queue.wire import SCHEMA, rows, split
from slipstream.queue.wire import trajectory as made
from slipstream.trajectory import Outcome, Trajectory, VersionRun

TASK = make_tasks(1)[0]


def lease(number: int, group: int = 7) -> Lease:
    return Lease(lease=number, group=group, member=0, attempt=2, task=TASK, seed=1, min_version=0, deadline_s=9.0)


def several() -> list[Trajectory]:
    empty = make_trajectory(lease(2), versions=(), prompt=0, outcome=Outcome.INVALID, reward=None)
    empty.version_runs, empty.spans, empty.detail = [], [], None
    return [make_trajectory(lease(1), versions=(3, 3, 4)), empty, make_trajectory(lease(3), versions=(4,), reward=0.5)]


def test_every_field_comes_back() -> None:
    before = several()
    batch = decode(encode(before))
    for row, trajectory in zip(batch.to_pylist(), before, strict=True):
        for name in ("lease", "group", "task", "attempt", "reward", "turns", "s_tool", "detail"):
            assert row[name] == getattr(trajectory, name)
        assert row["token_ids"] == list(trajectory.token_ids)
        assert row["sampled"] == [bool(each) for each in trajectory.sampled]
        assert row["logprobs"] == list(trajectory.logprobs)
        assert row["outcome"] == trajectory.outcome.value
        assert dict(row["reward_parts"]) == trajectory.reward_parts
        assert [VersionRun(**run) for run in row["version_runs"]] == trajectory.version_runs
        assert len(row["spans"]) == len(trajectory.spans)


def test_a_trajectory_is_made_again_from_its_row() -> None:
    for row, before in zip(split(decode(encode(several()))), several(), strict=True):
        assert made(decode([row])) == before


def test_the_ledgers_row() -> None:
    found = rows(decode(encode(several())))
    assert [row.tokens for row in found] == [3, 0, 1]
    assert found[0].versions == [VersionRun(2, 3), VersionRun(1, 4)]
    assert (found[1].outcome, found[1].reward, found[1].attempt) == (Outcome.INVALID, None, 2)
    assert [rows(decode([frame]))[0] for frame in split(decode(encode(several())))] == found


def test_packed_is_the_same_for_one_batch_and_for_many() -> None:
    together = packed(decode(encode(several())))
    apart = packed([decode(encode([each])) for each in several()])
    sliced = packed([decode(encode(several())).slice(row, 1) for row in range(3)])
    for one, two, three in zip(together, apart, sliced, strict=True):
        if isinstance(one, list):
            assert one == two == three
        else:
            assert one.dtype == two.dtype == three.dtype
            assert one.nan_to_num(-9).tolist() == two.nan_to_num(-9).tolist() == three.nan_to_num(-9).tolist()
    assert together.cu_seqlens.tolist() == [0, 5, 5, 8]
    assert together.versions.tolist() == [-1, -1, 3, 3, 4, -1, -1, 4]
    assert together.rewards.isnan().tolist() == [False, True, False]


def test_packed_does_not_copy_tokens() -> None:
    batch = decode(encode(several()))
    tensors = packed(batch)
    assert tensors.token_ids.data_ptr() == batch.column("token_ids").values.buffers()[1].address
    assert tensors.logprobs.data_ptr() == batch.column("logprobs").values.buffers()[1].address


def test_importing_a_module_hides_no_function() -> None:
    from slipstream import queue

    assert all(callable(getattr(queue, name)) for name in queue.__all__)


def tampered(change: dict[str, object], schema: pa.Schema = SCHEMA) -> list[pa.Buffer]:
    batch = decode(encode(several()))
    columns = [
        pa.array(change.get(field.name, batch.column(field.name).to_pylist()), field.type)
        if field.name in batch.schema.names
        else pa.nulls(3, field.type)
        for field in schema
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    return [sink.getvalue()]


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([], "0 frames"),
        ([b""], "not Arrow IPC"),
        ([b"\xff" * 64], "not Arrow IPC"),
        (tampered({}, SCHEMA.with_metadata({"slipstream.schema": "99"})), "schema version 99"),
        (tampered({}, SCHEMA.remove_metadata()), "schema version none"),
        (tampered({}, SCHEMA.append(pa.field("more", pa.int8()))), "columns differ"),
        (tampered({"logprobs": [[0.0]] * 3}), "differ in length"),
        (tampered({"logprobs": [[None] * 5, [], [0.0] * 3]}), "nulls"),
        (tampered({"lease": [1, None, 3]}), "column lease has nulls"),
        (tampered({"version_runs": [[], [], []]}), "do not cover"),
        (tampered({"version_runs": [[(5, 0)], [], [(3, -1)]]}), "nothing was sampled"),
        (tampered({"version_runs": [[(5, None)], [], [(3, -1)]]}), "nulls"),
        (tampered({"outcome": ["finished", "won", "finished"]}), "'won'"),
    ],
)
def test_a_bad_delivery_is_refused_by_name(frames: list[object], says: str) -> None:
    with pytest.raises(Malformed, match=says):
        decode(frames)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes_are_refused_or_still_whole(data: st.DataObject) -> None:
    frame = bytearray(encode(several())[0])
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frame = frame[: data.draw(st.integers(0, len(frame)) | st.just(len(frame)))]
    try:
        batch = decode([bytes(frame)])
    except Malformed:
        return
    assert all(row.tokens >= 0 for row in rows(batch))
    packed(batch)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(Malformed):
        decode([noise])


def test_a_row_is_plain_values() -> None:
    assert msgspec.json.encode(rows(decode(encode(several()))))
