"""Whatever bytes arrive, reading them ends in a refusal or in trajectories that are whole. `benchmarks/fuzz_queue.py`
runs the same for minutes."""

from array import array
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from queue_made import make_beat, make_config, make_tasks, make_trajectory, make_weights

from slipstream.queue import Malformed, decode, encode, packed
from slipstream.queue import messages as ms
from slipstream.queue.ledger import Ledger
from slipstream.queue.messages import Lease
from slipstream.queue.tasks import TaskOrder
from slipstream.queue.wire import rows, split

QUICK = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@cache
def seeds() -> list[bytes]:
    """Frames as they ought to be, of one and of several trajectories."""

    def lease(number: int) -> Lease:
        task = make_tasks()[0]
        return Lease(lease=number, group=0, member=0, attempt=0, task=task, seed=0, min_version=0, deadline_s=1.0)

    one, two = make_trajectory(lease(1)), make_trajectory(lease(2), versions=[1] * 70, reward=None)
    empty = make_trajectory(lease(3), versions=(), prompt=0)
    return [bytes(encode(each)[0]) for each in ([one], [one, two], [empty], [two, empty, one], [])]


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """A frame with some of its bytes changed, cut out, doubled, or put elsewhere."""
    frame = bytearray(draw(st.sampled_from(seeds())))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, max(0, len(frame) - 1)))
        match draw(st.sampled_from(["bit", "byte", "word", "cut", "double", "insert", "end"])):
            case "bit" if frame:
                frame[at] ^= 1 << draw(st.integers(0, 7))
            case "byte" if frame:
                frame[at] = draw(st.integers(0, 255))
            case "word":
                words = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF, 1 << 40]
                word = draw(st.sampled_from(words)).to_bytes(8, "little")[: draw(st.sampled_from([2, 4, 8]))]
                frame[at - at % 4 : at - at % 4 + len(word)] = word
            case "cut":
                del frame[at : at + draw(st.integers(1, 64))]
            case "double":
                frame[at:at] = frame[at : at + draw(st.integers(1, 64))]
            case "insert":
                frame[at:at] = draw(st.binary(max_size=32))
            case _:
                del frame[at:]
    return bytes(frame)


def read(frame: bytes) -> str:
    """All that the broker and the learner do with a frame. Anything but a refusal or whole trajectories raises."""
    try:
        batch = decode([frame])
    except Malformed:
        return "refused"
    found = rows(batch)
    tensors = packed(batch)
    assert len(found) == len(tensors.leases) == batch.num_rows
    assert int(tensors.cu_seqlens[-1]) == len(tensors.token_ids) == len(tensors.versions) == len(tensors.sampled)
    assert sum(row.tokens for row in found) == int(tensors.sampled.sum()) == int((tensors.versions >= 0).sum())
    for row, alone in zip(found, split(batch), strict=True):
        assert rows(decode([alone])) == [row]
    return "taken"


@given(frames())
@QUICK
def test_frames_that_were_tampered_with(frame: bytes) -> None:
    read(frame)


@given(st.binary(max_size=300))
@QUICK
def test_noise_is_refused(noise: bytes) -> None:
    assert read(noise) == "refused"


@pytest.mark.parametrize("seed", range(5))
def test_what_is_whole_is_taken(seed: int) -> None:
    assert read(seeds()[seed]) == "taken"


REQUESTS: list[ms.Request] = [
    ms.Hello(role="rollouter", name="a", pid=1),
    ms.Hello(role="learner", name="l", pid=1, version=3),
    ms.Ask(name="a", room=3, wait_s=1.0),
    ms.GiveBack(name="a", leases=[1, 2], reason="left"),
    ms.Beat(beat=make_beat("a", [1, 2], 5)),
    ms.Publish(weights=make_weights(1)),
    ms.Take(room=2, held=[0], wait_s=0.0),
    ms.Settle(groups=[0], fates=[ms.Fate(lease=1, outcome="finished", trained=3)], version=1),
    ms.Checkpointed(version=1),
    ms.Evaluate(version=0),
    ms.AskParked(name="a", lease=1),
    ms.DropParked(name="a", lease=1),
]
NUMBERS = st.one_of(st.integers(-3, 6), st.integers(-(1 << 63), (1 << 64) - 1))


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request with a number of it changed."""

    def change(value: Any) -> Any:
        match value:
            case bool():
                return value
            case int() | float():
                return draw(NUMBERS) if draw(st.booleans()) else value
            case list():
                return [change(each) for each in value] * draw(st.integers(0, 2))
            case dict():
                return {name: change(each) for name, each in value.items()}
            case _:
                return value

    return msgspec.msgpack.encode(change(msgspec.to_builtins(draw(st.sampled_from(REQUESTS)))))


@given(st.lists(requests(), max_size=12))
@QUICK
def test_requests_with_any_numbers_leave_a_ledger_that_adds_up(said: list[bytes]) -> None:
    """What the decoder lets through is booked or refused, and what was booked can be written down."""
    ledger = Ledger(make_config(), TaskOrder(make_tasks(), make_tasks(2, "h"), seed=0))
    decoder = msgspec.msgpack.Decoder(ms.Request)
    for number, frame in enumerate(said):
        try:
            request = decoder.decode(frame)
        except msgspec.DecodeError:
            continue
        match request:
            case ms.Hello():
                ledger.hello(request.role, request.name, number, request.version, 0.0)
            case ms.Ask():
                ledger.ask(request.name, request.room, number, 0.0)
            case ms.GiveBack():
                ledger.give_back(request.name, request.leases, request.reason)
            case ms.Beat():
                ledger.beat(request.beat, 100.0 * number)
            case ms.Publish():
                ledger.publish(request.weights)
            case ms.Take():
                ledger.take(request.room, request.held)
            case ms.Settle():
                ledger.settle(request.groups, request.fates, request.version)
            case ms.Checkpointed():
                ledger.checkpointed(request.version)
            case ms.Evaluate():
                ledger.evaluate(request.version)
            case ms.AskParked():
                ledger.parked(request.name, request.lease)
            case ms.DropParked():
                ledger.drop_parked(request.name, request.lease)
            case _:
                raise AssertionError(request)
        ledger.expire(100.0 * number)
        msgspec.msgpack.encode([ledger.events, ledger.status()])
    status = ledger.status()
    assert status.tokens.holds()
    assert status.leases.holds()


def test_the_seeds_have_per_token_buffers() -> None:
    assert len(array("i", packed(decode([seeds()[1]])).token_ids.tolist())) == 5 + 72
