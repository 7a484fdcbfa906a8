"""Honest clocks: all wall time is in a part, whatever is entered when."""

from hypothesis import given
from hypothesis import strategies as st

from slipstream.observe.clock import Clock

moves = st.lists(st.tuples(st.floats(0, 1e4), st.sampled_from(["a", "b", "c"])), max_size=30)


@given(moves, st.floats(0, 1e4))
def test_parts_sum_to_the_wall_time(moves: list[tuple[float, str]], rest: float) -> None:
    at = [100.0]
    clock = Clock("learner", "starting", now=lambda: at[0])
    for seconds, part in moves:
        at[0] += seconds
        clock.enter(part)
    at[0] += rest
    reading = clock.reading()
    assert abs(sum(reading.parts.values()) - (at[0] - 100.0)) < 1e-6
    assert reading.now == (moves[-1][1] if moves else "starting")


def test_a_wait_keeps_its_beginning_and_its_newest_reason() -> None:
    clock = Clock("rollouter", "no lease")
    since = clock.reading().since
    clock.enter("no lease", why="staleness.depth: 96 of 96 are running")
    reading = clock.reading()
    assert reading.since == since
    assert reading.why == "staleness.depth: 96 of 96 are running"
