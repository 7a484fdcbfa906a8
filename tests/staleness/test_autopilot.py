"""The controller of depth: alone, against any history; and on the simulator, where it must come to rest."""

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.queue.messages import StepPace, Weights
from slipstream.queue.state import LedgerState
from slipstream.simulator import simulate
from slipstream.simulator.durations import parse
from slipstream.simulator.scenario import Scenario
from slipstream.simulator.world import made_ledger
from slipstream.staleness import Autopilot, StepSeen
from slipstream.staleness.autopilot import WINDOW

steps = st.builds(StepSeen, waited=st.floats(0, 1), refused=st.booleans(), ess=st.none() | st.floats(0, 1))


@given(st.lists(steps, max_size=60), st.floats(0, 4), st.floats(0, 4))
@settings(max_examples=100)
def test_it_stays_within_its_bounds_and_moves_once_a_window(seen: list[StepSeen], least: float, spread: float) -> None:
    most = least + spread
    pilot, depth, moved = Autopilot(least=least, most=most, ess_floor=0.5), least, 0
    for step in seen:
        move = pilot.step(depth, step)
        moved += move is not None
        if move:
            assert least - 1e-3 <= move.depth <= most + 1e-3
            assert move.why
            depth = move.depth
    assert moved <= len(seen) // WINDOW


def after(pilot: Autopilot, depth: float, seen: StepSeen, windows: int = 1) -> float:
    for _ in range(windows * WINDOW):
        move = pilot.step(depth, seen)
        depth = move.depth if move else depth
    return depth


def test_it_goes_up_only_where_that_helps() -> None:
    starved = StepSeen(waited=0.5, refused=True, ess=1.0)
    assert after(Autopilot(least=0, most=8, ess_floor=0.5), 1.0, starved) == 1.25
    slow_rollouters = StepSeen(waited=0.5, refused=False, ess=1.0)
    assert after(Autopilot(least=0, most=8, ess_floor=0.5), 1.0, slow_rollouters) == 0.75


def test_under_the_floor_of_ess_it_backs_off_whatever_waits() -> None:
    pilot = Autopilot(least=0.5, most=8, ess_floor=0.5)
    assert after(pilot, 4.0, StepSeen(waited=0.9, refused=True, ess=0.3)) == 2.8
    assert after(pilot, 2.8, StepSeen(waited=0.9, refused=True, ess=0.3), windows=20) == 0.5


def test_what_was_too_small_is_not_tried_again_for_a_while() -> None:
    pilot, depth = Autopilot(least=0, most=8, ess_floor=0.5), 1.0
    depth = after(pilot, depth, StepSeen(waited=0.5, refused=True, ess=1.0))
    calm = StepSeen(waited=0.0, refused=True, ess=1.0)
    assert after(pilot, depth, calm, windows=5) == depth == 1.25
    assert after(pilot, depth, calm, windows=10) < depth


def scenario(depth: float | Literal["auto"], **more: object) -> Scenario:
    settings = {"batch": 8, "group": 1, "cutoff": 100, "concurrency": 128, "batches": 400, "seed": 3, **more}
    return Scenario(
        depth=depth, step_s=parse("0.5", "step_s"), latency=parse("lognormal:1.0,1.0", "latency"), **settings
    )  # type: ignore[arg-type]


def test_on_the_simulator_it_finds_the_least_depth_that_keeps_the_learner_busy() -> None:
    by_depth = {depth: simulate(scenario(depth)) for depth in (1.0, 2.0, 4.0, 8.0)}
    auto = simulate(scenario("auto"))
    assert auto.accounts_hold
    best = max(result.learner_busy for result in by_depth.values())
    assert auto.learner_busy > 0.93 * best
    assert auto.learner_busy > by_depth[1.0].learner_busy
    assert auto.staleness_mean < by_depth[8.0].staleness_mean
    enough = min(depth for depth, result in by_depth.items() if result.learner_busy > 0.93 * best)
    assert auto.depth <= 2 * enough


@pytest.mark.parametrize("seed", [1, 2])
def test_on_the_simulator_it_does_not_open_the_gate_for_slow_rollouters(seed: int) -> None:
    """Too few slots: the learner always waits, and no depth helps."""
    slow = simulate(scenario("auto", concurrency=4, seed=seed))
    assert slow.learner_waiting > 0.3
    assert slow.depth <= 2.0


def test_a_queue_that_is_started_again_goes_on_at_the_depth_it_had() -> None:
    ledger = made_ledger(scenario("auto"))
    for version in range(3 * WINDOW):
        assert len(ledger.ask("r", 1000, version, 0.0).leases) < 1000  # the gate refuses the rest
        ledger.publish(Weights(version=version, location="", checksum="", tensors=[]), StepPace(waited=0.9, ess=1.0))
    depth = ledger.status().depth
    assert depth > 1.0
    state = LedgerState()
    for event in ledger.events:
        state.apply(event)
    assert made_ledger(scenario("auto"), state).status().depth == depth
