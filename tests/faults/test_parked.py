"""A rollouter is killed in the middle of long trajectories, and the next one goes on where they were."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "queue"))

from queue_made import make_weights  # noqa: E402
from queue_runs import queue  # noqa: E402

from slipstream.queue import accounts  # noqa: E402
from slipstream.queue.client import LearnerClient  # noqa: E402
from slipstream.queue.messages import LeaseCounts  # noqa: E402
from slipstream.queue.wire import trajectory  # noqa: E402
from slipstream.trajectory import Trajectory, VersionRun  # noqa: E402

TURN = len('<tool_call>{"name":"step","arguments":{}}</tool_call>') + 1  # tokens, which are bytes
ENVIRONMENT = '''
import time
from pathlib import Path
from slipstream import Environment, reward, tool
from slipstream.tools import ToolSet

class Steps(ToolSet):
    def __init__(self):
        self.steps = 0

    @tool
    def step(self) -> int:
        """Go one step."""
        while self.steps == 2 and not Path("go").exists():
            time.sleep(0.01)
        self.steps += 1
        return self.steps

    def save(self):
        return b"%d" % self.steps

    def restore(self, state):
        self.steps = int(state)

@reward
def walked(trajectory) -> float:
    return 1.0

environment = Environment(tools=[Steps], rewards=[walked])
'''
CONFIG = """
[model]
path = "{model}"
[environment]
path = "environment.py:environment"
[tasks]
train = "tasks.jsonl"
[rollout]
group = 2
concurrency = 2
max_turns = 4
max_seconds = 60
tool_seconds = 50
park_seconds = 0.000001
"""


def rollouter(folder: Path, run: Path) -> "subprocess.Popen[bytes]":
    paths = os.pathsep.join([str(HERE), *sys.path])
    return subprocess.Popen(
        [sys.executable, str(HERE / "stepping_rollouter.py"), "rollouter", "config.toml", "--dir", str(run)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
    )


def test_the_next_rollouter_goes_on_with_what_was_parked(tmp_path: Path, models: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "environment.py").write_text(ENVIRONMENT)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "?"}')
    (tmp_path / "config.toml").write_text(CONFIG.format(model=models / "stable"))
    with queue(run, run={"steps": 1}, learner={"batch": 1}, staleness={"depth": 0, "cutoff": 8}) as it:
        learner = LearnerClient(it.url, version=0)
        first = rollouter(tmp_path, run)
        second: subprocess.Popen[bytes] | None = None
        try:
            learner.publish(make_weights(0))
            until(learner, lambda counts: counts.tokens_parked == 2 * 2 * TURN)
            first.kill()
            first.wait()
            learner.publish(make_weights(1))
            (tmp_path / "go").touch()
            second = rollouter(tmp_path, run)
            ((_, batches),), why = learner.take(1, 60.0)
        finally:
            for process in filter(None, (first, second)):
                process.kill()
                process.wait()
            learner.close()
        it.stop()
    found = [trajectory(batch) for batch in batches]
    assert len(found) == 2, why
    for one in found:
        assert results(one) == ["1", "2", "3", "4"][: one.tool_calls]
        assert sampled_by_version(one) == {0: 2 * TURN, 1: 2 * TURN}
        assert (one.attempt, one.turns, one.reward) == (1, 4, 1.0)
    from slipstream.config import RunDir

    counts = accounts(RunDir(run))
    assert counts.holds()
    assert counts.tokens.generated == 2 * 4 * TURN
    assert counts.leases.tokens_parked == 0
    assert counts.leases.tokens_lost in (0, TURN, 2 * TURN)  # of the third turn, as of the last heartbeat


def until(learner: LearnerClient, condition: Callable[[LeaseCounts], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition(counts := learner.status().leases):
        assert time.monotonic() < deadline, counts
        time.sleep(0.05)


def results(one: Trajectory) -> list[str]:
    messages = msgspec.json.decode(one.detail or b"")["messages"]
    return [message["content"] for message in messages if message["role"] == "tool"]


def sampled_by_version(one: Trajectory) -> dict[int, int]:
    counts: dict[int, int] = {}
    for piece in one.version_runs:
        assert isinstance(piece, VersionRun)
        if piece.version >= 0:
            counts[piece.version] = counts.get(piece.version, 0) + piece.length
    return counts
