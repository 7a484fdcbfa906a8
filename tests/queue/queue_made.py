"""Trajectories and configs for the queue's tests."""

from array import array
from collections.abc import Sequence

import msgspec

from slipstream.config import Config
from slipstream.observe.clock import ClockReading
from slipstream.queue.messages import Lease, RollouterBeat, TensorInfo, Weights
from slipstream.queue.row import Row
from slipstream.task import Task
from slipstream.trajectory import Outcome, Span, SpanKind, Trajectory, VersionRun


def make_config(**sections: dict[str, object]) -> Config:
    raw: dict[str, dict[str, object]] = {
        "model": {"path": "m"},
        "environment": {"path": "e.py:e"},
        "tasks": {"train": "t.jsonl"},
        "run": {"steps": 1000},
        "rollout": {"group": 2},
        "learner": {"batch": 2},
        "staleness": {"depth": 1.0, "cutoff": 2},
    }
    for name, values in sections.items():
        raw[name] = {**raw.get(name, {}), **values}
    return msgspec.convert(raw, Config)


def make_tasks(count: int = 5, prefix: str = "t") -> list[Task]:
    return [Task(id=f"{prefix}{n}", prompt="?", answer=str(n)) for n in range(count)]


def make_trajectory(
    lease: Lease,
    *,
    versions: Sequence[int] = (0, 0, 0),
    outcome: Outcome = Outcome.FINISHED,
    reward: float | None = 1.0,
    prompt: int = 2,
) -> Trajectory:
    """A prompt, then one sampled token for each of `versions`."""
    length = prompt + len(versions)
    return Trajectory(
        lease=lease.lease,
        group=lease.group,
        task=lease.task.id,
        attempt=lease.attempt,
        token_ids=array("i", range(length)),
        sampled=bytearray([0] * prompt + [1] * len(versions)),
        logprobs=array("f", [0.0] * prompt + [-0.5] * len(versions)),
        version_runs=[VersionRun(prompt, -1), *(VersionRun(1, version) for version in versions)],
        spans=[Span(SpanKind.PROMPT, 0, 0, prompt), Span(SpanKind.SAMPLED, 0, prompt, len(versions))],
        outcome=outcome,
        reward=reward,
        reward_parts={"exact": reward or 0.0},
        detail=b"{}",
    )


def make_weights(version: int) -> Weights:
    return Weights(
        version=version,
        location=f"/dev/shm/none-{version}",
        checksum=f"{version}",
        tensors=[TensorInfo("w", "float32", [1])],
    )


def make_beat(name: str, leases: Sequence[int] = (), tokens: int = 0) -> RollouterBeat:
    return RollouterBeat(
        name=name,
        version=0,
        running=len(leases),
        leases=list(leases),
        tokens_in_flight=[tokens for _ in leases],
        tokens_generated=0,
        pause_ms=[],
        clock=ClockReading(process=name, parts={}, now="generating"),
    )


def make_row(lease: Lease, versions: list[int], outcome: Outcome = Outcome.FINISHED, reward: float | None = 1.0) -> Row:
    runs = [VersionRun(versions.count(version), version) for version in sorted(set(versions))]
    return Row(lease.lease, lease.group, lease.task.id, lease.attempt, len(versions), runs, outcome, reward)
