"""Checkpoints: what is loaded is what was saved, a damaged one is passed over, a kill leaves the one before."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slipstream.learner import checkpoint
from slipstream.learner.optimizer import Optimizer, learning_rate


class Small:
    """As much of a learner as a checkpoint is made of."""

    def __init__(self, size: int = 8) -> None:
        torch.manual_seed(1)
        self.policy = SimpleNamespace(model=torch.nn.Linear(size, size), device=torch.device("cpu"))
        self.optimizer = Optimizer(
            list(self.policy.model.parameters()),
            rate=learning_rate(0.1, 2, 10, "linear"),
            clip_norm=1.0,
            betas=(0.9, 0.95),
            weight_decay=0.1,
        )

    def train(self, step: int) -> None:
        self.policy.model(torch.rand(3, self.policy.model.in_features)).pow(2).sum().backward()
        self.optimizer.step(step)

    def save(self, folder: Path, version: int) -> None:
        checkpoint.save(folder, version, self.policy, self.optimizer)  # type: ignore[arg-type]

    def load(self, folder: Path) -> int:
        return checkpoint.load_newest(folder, self.policy, self.optimizer)  # type: ignore[arg-type]

    def weights(self) -> torch.Tensor:
        return self.policy.model.weight.detach().clone()


def test_what_goes_on_after_loading_is_what_would_have_gone_on(tmp_path: Path) -> None:
    """To the bit: weights, moments, learning rate and random state."""
    through = Small()
    for step in range(3):
        through.train(step)
    through.save(tmp_path, 3)
    for step in range(3, 6):
        through.train(step)
    resumed = Small()
    assert resumed.load(tmp_path) == 3
    for step in range(3, 6):
        resumed.train(step)
    assert resumed.weights().equal(through.weights())


def test_without_a_checkpoint_it_is_version_0(tmp_path: Path) -> None:
    assert Small().load(tmp_path / "none") == 0


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    small = Small()
    for version in (1, 2, 9, 10):
        small.save(tmp_path, version)
    assert [path.name for path in checkpoint.whole(tmp_path)] == ["v00000009.pt", "v00000010.pt"]
    assert len(list(tmp_path.iterdir())) == 2


def cut(part: float) -> Callable[[bytes], bytes]:
    return lambda whole: whole[: int(len(whole) * part)]


@pytest.mark.parametrize(
    "damage", [cut(0), cut(0.3), cut(0.99), lambda whole: b"\0" * len(whole), lambda whole: b"junk" * 99]
)
def test_a_damaged_one_is_passed_over_with_a_warning(
    tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    small = Small()
    small.save(tmp_path, 1)
    expected = small.weights()
    small.train(1)
    small.save(tmp_path, 2)
    path = tmp_path / "v00000002.pt"
    path.write_bytes(damage(path.read_bytes()))
    resumed = Small()
    resumed.train(0)
    with caplog.at_level(logging.WARNING):
        assert resumed.load(tmp_path) == 1
    assert "v00000002.pt cannot be read, trying the one before" in caplog.text
    assert resumed.weights().equal(expected)
    resumed.save(tmp_path, 2)  # made again, it counts as whole
    assert Small().load(tmp_path) == 2


SAVER = """
import itertools, sys
sys.path.insert(0, {here!r})
from pathlib import Path
from test_checkpoint import Small
small, folder = Small(1000), Path(sys.argv[1])
for version in itertools.count(int(sys.argv[2])):
    small.policy.model.weight.data.fill_(version)
    small.save(folder, version)
    print(version, flush=True)
"""


def test_a_kill_while_saving_leaves_a_whole_one(tmp_path: Path) -> None:
    """kill -9 at whatever moment: the newest that was reported as saved, or the one after it, loads."""
    last = 0
    for round_ in range(4):
        saver = subprocess.Popen(
            [sys.executable, "-c", SAVER.format(here=str(Path(__file__).parent)), str(tmp_path), str(last + 1)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert saver.stdout is not None
            for _ in range(5 + round_):
                last = int(saver.stdout.readline())
            time.sleep(0.004 * round_)  # somewhere else in what it does
        finally:
            os.kill(saver.pid, signal.SIGKILL)
            rest = saver.communicate()[0].split()
        last = max([last, *map(int, rest)])
        found = Small(1000)
        version = found.load(tmp_path)
        assert version in (last, last + 1)
        assert found.weights().unique().tolist() == [version]
        assert not list(tmp_path.glob(".v*"))  # what was half written is gone
        assert not list(tmp_path.glob("*.damaged"))  # and never had the name of a whole one
        last = version
