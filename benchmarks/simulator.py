"""How fast the simulator is: a day of 1,000 rollouters, and what of that is the real ledger's own time.

The ledger alone is given the same number of groups, as fast as it takes them, in the same process. The last line is one
JSON object; with --json there is only that.

    python benchmarks/simulator.py [--json] [--hours 24] [--turns 1]
"""

import argparse
import time

import msgspec

from slipstream.queue.messages import Fate, Weights
from slipstream.queue.row import Row
from slipstream.simulator import Result, Scenario, read_scenario, simulate
from slipstream.simulator.world import NOWHERE, made_ledger
from slipstream.trajectory import Outcome, VersionRun

STEP_S = 300.0
GROUP, BATCH = 8, 128
LEDGER_STEPS = 40


class Measurement(msgspec.Struct, frozen=True):
    virtual_hours: float
    trajectories: int
    wall_s: float
    times_real: float  # virtual seconds a second
    us_per_trajectory: float
    us_per_trajectory_ledger: float  # the ledger alone
    over_ledger: float
    learner_busy: float
    rollouter_busy: float


def day(hours: float, turns: int) -> Scenario:
    """Trajectories of half an hour: 36,000 tokens at 20 a second."""
    return read_scenario(
        [
            f"batch={BATCH}",
            f"group={GROUP}",
            "depth=12",
            "cutoff=24",
            "rollouters=1000",
            "concurrency=8",
            "tokens=lognormal:36000,0.8",
            "decode_s=0.05",
            f"turns={turns}",
            "tool_s=lognormal:20,1",
            f"step_s={STEP_S}",
            "sync_s=2",
            "publish_s=5",
            f"batches={max(1, int(hours * 3600 / STEP_S))}",
        ]
    )


def ledger_alone() -> float:
    """Seconds a trajectory: granted, delivered, taken, settled."""
    ledger = made_ledger(read_scenario([f"batch={BATCH}", f"group={GROUP}", "depth=0", "latency=1"]))
    began = time.perf_counter()
    for version in range(LEDGER_STEPS):
        ledger.publish(Weights(version=version, location="", checksum="", tensors=[]))
        leases = ledger.ask("a", BATCH * GROUP, version, 0.0).leases
        for lease in leases:
            runs = [VersionRun(100, version)]
            row = Row(lease.lease, lease.group, lease.task.id, lease.attempt, 100, runs, Outcome.FINISHED, 1.0)
            assert ledger.expects(row)
            ledger.deliver(row, NOWHERE)
        groups = [taken.group for taken in ledger.take(BATCH, [])]
        fates = [Fate(lease=lease.lease, outcome="finished", trained=100) for lease in leases]
        ledger.settle(groups, fates, version + 1)
        ledger.checkpointed(version + 1)
        ledger.events.clear()
    return (time.perf_counter() - began) / (LEDGER_STEPS * BATCH * GROUP)


def measure(hours: float, turns: int) -> Measurement:
    alone = ledger_alone()
    scenario = day(hours, turns)
    began = time.perf_counter()
    result: Result = simulate(scenario)
    wall_s = time.perf_counter() - began
    each = wall_s / result.trajectories
    virtual_s = result.virtual_s * scenario.batches / result.batches
    return Measurement(
        virtual_hours=virtual_s / 3600,
        trajectories=result.trajectories,
        wall_s=wall_s,
        times_real=virtual_s / wall_s,
        us_per_trajectory=each * 1e6,
        us_per_trajectory_ledger=alone * 1e6,
        over_ledger=each / alone,
        learner_busy=result.learner_busy,
        rollouter_busy=result.rollouter_busy,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--turns", type=int, default=1)
    arguments = parser.parse_args()
    found = measure(arguments.hours, arguments.turns)
    if not arguments.json:
        print(
            f"{found.virtual_hours:.1f} hours of 1,000 rollouters, {found.trajectories:,} trajectories: "
            f"{found.wall_s:.1f} s, {found.times_real:,.0f} times as fast as real\n"
            f"{found.us_per_trajectory:.0f} us a trajectory, {found.over_ledger:.1f} times the ledger alone"
        )
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
