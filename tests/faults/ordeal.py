"""What is done to a run, and what must hold after it.

A fault strikes some random time after a step, at a process that is there then: SIGKILL, or SIGSTOP and, some seconds
later, SIGCONT. A supervisor that was killed takes all of its run with it, and is started again by hand.
"""

import os
import random
import signal
import time
from collections import Counter

import msgspec
import psutil
from small_run import SmallRun

from slipstream.config import RunDir
from slipstream.configfile import read_config
from slipstream.learner.replay import Replay
from slipstream.queue import accounts
from slipstream.queue import events as ev
from slipstream.queue.journal import read_events

ROLES = ("queue", "rollouter", "learner", "supervisor")
KINDS = ("kill", "stop")


class Fault(msgspec.Struct, frozen=True):
    role: str
    kind: str
    step: int  # after which it strikes
    delay: float  # seconds after that
    seconds: float = 0.0  # that a stopped process stands still


class Outcome(msgspec.Struct):
    """Of one run."""

    wrong: list[str]
    inflicted: dict[str, int]  # by role and kind
    versions_made_again: int = 0
    duplicates: int = 0
    leases_returned: int = 0
    trajectories: int = 0


def faults_of(kinds: "list[tuple[str, str]]", steps: int, chance: random.Random, longest: float = 5.0) -> list[Fault]:
    """Each at a step of its own, spread over the run but for its last fifth."""
    at = sorted(chance.sample(range(1, steps * 4 // 5), len(kinds)))
    return [
        Fault(role, kind, step, chance.uniform(0, 0.4), chance.uniform(0.2, longest) if kind == "stop" else 0.0)
        for (role, kind), step in zip(kinds, at, strict=True)
    ]


def inflict(faults: list[Fault], run: SmallRun, patience: float) -> "Counter[str]":
    """Strike, one after the other. Raises TimeoutError with what it waited for; ends early when the run does."""
    chance = random.Random(len(faults))
    inflicted: Counter[str] = Counter()
    for fault in faults:
        deadline = time.monotonic() + patience
        struck = False
        while not struck and not run.over:
            if time.monotonic() > deadline:
                steps = _steps(run.run_dir)
                raise TimeoutError(f"{fault} could not strike within {patience:.0f} s: {steps} steps so far")
            if _steps(run.run_dir) >= fault.step:
                time.sleep(fault.delay)
                struck = _strike(fault, run, chance)
            time.sleep(0.02)
        inflicted[f"{fault.role} {fault.kind}"] += struck
    return inflicted


def _strike(fault: Fault, run: SmallRun, chance: random.Random) -> bool:
    """False when there is no such process now."""
    try:
        there = psutil.Process(run.process.pid).children()
        pids = [child.pid for child in there if fault.role in child.cmdline()]
        if fault.role == "supervisor":
            pids = [run.process.pid]
        if not pids:
            return False
        pid = chance.choice(pids)
        os.kill(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        if fault.kind == "stop":
            time.sleep(fault.seconds)
            os.kill(pid, signal.SIGCONT)
    except (psutil.Error, ProcessLookupError):
        return False
    if (fault.role, fault.kind) == ("supervisor", "kill"):
        run.process.wait()
        _, left = psutil.wait_procs(there, timeout=10)
        if left:
            raise TimeoutError(f"{left} outlived their supervisor by 10 s")
        run.start()
    return True


def _steps(run_dir: RunDir) -> int:
    """The highest that the learner has logged."""
    if not run_dir.metrics.is_file():
        return 0
    lines = run_dir.metrics.read_bytes().split(b"\n")[:-1]
    return max((int(msgspec.json.decode(line)["step"]) for line in lines), default=0)


def outcome(run: SmallRun, inflicted: "Counter[str]") -> Outcome:
    """After the run has ended: what is wrong, from its journal alone."""
    run_dir, steps = run.run_dir, run.steps
    counts = accounts(run_dir)
    wrong = consumed_twice(run_dir)
    if not counts.holds():
        wrong.append(f"the accounts do not hold: {counts}")
    replay = Replay(read_config(run_dir.config, files=False), run_dir)
    made = [step.version for step in replay]
    verdict = replay.verdict()
    if made != list(range(1, steps + 1)):
        wrong.append(f"versions {made[:1]} to {made[-1:]} instead of 1 to {steps}")
    if not verdict.identical:
        wrong.append(f"a replay makes other versions: {verdict}")
    lines = run_dir.metrics.read_bytes().count(b"\n")
    return Outcome(
        wrong=wrong,
        inflicted=dict(inflicted),
        versions_made_again=max(0, lines - steps),
        duplicates=counts.leases.duplicates,
        leases_returned=sum(counts.leases.returned.values()),
        trajectories=counts.trajectories.generated,
    )


def consumed_twice(run_dir: RunDir) -> list[str]:
    """Trajectories that went into two versions of one timeline, or were never delivered, or delivered twice."""
    wrong: list[str] = []
    delivered: set[int] = set()
    consumed: dict[int, int] = {}  # version, by lease
    for _, event in read_events(run_dir.journal):
        match event:
            case ev.TrajectoryDelivered():
                if event.lease in delivered:
                    wrong.append(f"lease {event.lease} was delivered twice")
                delivered.add(event.lease)
            case ev.LearnerJoined():
                consumed = {lease: version for lease, version in consumed.items() if version <= event.version}
            case ev.FatesSettled():
                for fate in event.fates:
                    if fate.lease in consumed:
                        wrong.append(f"lease {fate.lease} was settled twice, first for {consumed[fate.lease]}")
                    if fate.lease not in delivered:
                        wrong.append(f"lease {fate.lease} was settled and never delivered")
                    if event.version is not None:
                        consumed[fate.lease] = event.version
            case _:
                pass
    return wrong
