"""Rollouters come and go in the middle of a run, and the learner notices it in its pace alone."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from queue_made import make_weights
from queue_runs import HERE, Queue, queue

from slipstream.cli import main
from slipstream.queue import accounts, address, packed
from slipstream.queue.client import LearnerClient
from slipstream.queue.joining import fetch_config
from slipstream.queue.messages import Fate

STEPS = 30


@contextlib.contextmanager
def workers(it: Queue, key: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts rollouters that know an address and a copy of the key; ends those that are left."""
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(HERE / "worker_process.py"), address.split(it.url)[0], str(key), name]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
        started.append(subprocess.Popen(command, env=env))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.wait()


def step(learner: LearnerClient, version: int) -> None:
    taken: list[tuple[int, list[object]]] = []
    until = time.monotonic() + 60
    while len(taken) < 2:
        found, why = learner.take(2 - len(taken), 1.0)
        taken += found
        assert time.monotonic() < until, why
    fates = [
        Fate(lease=int(tensors.leases[n]), outcome="finished", trained=3)
        for tensors in (packed(batches) for _, batches in taken)
        for n in range(len(tensors.leases))
    ]
    learner.publish(make_weights(version))
    learner.settle([number for number, _ in taken], fates, version)


def test_start_one_add_three_kill_two_remove_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "run"
    root.mkdir()
    sections = {
        "run": {"steps": STEPS},
        "queue": {"listen": "tcp://127.0.0.1:*", "lease_seconds": 5.0},
        "rollout": {"group": 2, "max_seconds": 4.0},
        "staleness": {"depth": 2, "cutoff": 99},
    }
    with queue(root, **sections) as it:
        key = Path(shutil.copy(root / "queue.key", tmp_path / "copied.key"))
        key.chmod(0o600)
        with workers(it, key) as start, contextlib.closing(LearnerClient(it.url, version=0)) as learner:
            learner.publish(make_weights(0))
            here = {"a": start("a")}
            seen: set[str] = set()
            for version in range(1, STEPS + 1):
                if version == 5:
                    here |= {name: start(name) for name in "bcd"}
                if version == 12:
                    for name in "ab":
                        here[name].kill()
                if version == 20:
                    here["c"].terminate()
                step(learner, version)
                seen |= {beat.name for beat in learner.status().rollouters}
                if version in (11, 19):  # the event that the next change waits for
                    wanted = {"a", "b", "c", "d"} if version == 11 else {"c", "d"}
                    until = time.monotonic() + 60
                    while not wanted <= {beat.name for beat in learner.status().rollouters}:
                        assert time.monotonic() < until
                        time.sleep(0.05)
            learner.checkpointed(STEPS)
            assert here["c"].wait(20) == 0
            assert here["d"].poll() is None
            counts = learner.status().leases
            assert counts.holds()
        assert it.stop() == 0
    found = accounts(it.run_dir)
    assert found.holds()
    assert found.trajectories.trained == STEPS * 2 * 2


def test_a_new_machine_gets_the_config_by_address_and_key(tmp_path: Path) -> None:
    with queue(tmp_path, queue={"listen": "tcp://127.0.0.1:*"}, run={"name": "elastic"}) as it:
        assert fetch_config(it.url).run.name == "elastic"


def test_joining_without_a_queue_or_key_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("slipstream.queue.joining.GIVE_UP", 0.3)
    monkeypatch.setattr("slipstream.queue.joining.PATIENCE", 0.1)
    assert main(["rollouter", "--connect", f"ipc://{tmp_path}/none.sock"]) == 2
    assert "no queue answered" in capsys.readouterr().err
    assert main(["rollouter", "--connect", "tcp://127.0.0.1:1"]) == 2
    assert "wants a key" in capsys.readouterr().err
    assert main(["rollouter"]) == 2
    assert "--connect URL" in capsys.readouterr().err
