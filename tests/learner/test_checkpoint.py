"""Checkpoints: what is loaded is what was saved, a damaged one is passed over, a kill leaves the one before."""

import contextlib
import itertools
import logging
import random
import resource
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.learner import checkpoint
from slipstream.learner.optimizer import Optimizer, learning_rate


class Small:
    """As much of a learner as a checkpoint is made of."""

    def __init__(self, size: int = 8) -> None:
        torch.manual_seed(1)
        model = torch.nn.Linear(size, size)
        self.policy = SimpleNamespace(model=model, parts=model.state_dict, device=torch.device("cpu"))
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

    def save(self, folder: Path, version: int, keep: int = 2) -> None:
        checkpoint.write(folder, checkpoint.snapshot(version, self.policy, self.optimizer), keep)  # type: ignore[arg-type]

    def load(self, folder: Path) -> int:
        return checkpoint.load_newest(folder, lambda path: checkpoint.load(path, self.policy, self.optimizer))  # type: ignore[arg-type]

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


@pytest.mark.parametrize("keep", [1, 3])
def test_the_last_few_are_kept(tmp_path: Path, keep: int) -> None:
    small = Small()
    for version in (1, 2, 8, 9, 10):
        small.save(tmp_path, version, keep)
    assert [checkpoint.version_of(path) for path in checkpoint.whole(tmp_path)] == [8, 9, 10][-keep:]
    assert len(list(tmp_path.iterdir())) == keep


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is what there was when `save` was called."""
    go_on = threading.Event()
    write = checkpoint.write

    def slow(*arguments: Any) -> None:
        assert go_on.wait(30)
        write(*arguments)

    monkeypatch.setattr(checkpoint, "write", slow)
    small, saver = Small(), checkpoint.Saver(tmp_path, 1)
    small.train(0)
    expected = small.weights()
    saver.save(1, small.policy, small.optimizer)  # type: ignore[arg-type]
    small.train(1)
    assert saver.final() is None
    go_on.set()
    saver.wait()
    assert saver.final() == 1
    assert saver.final() is None  # said once
    saver.close()
    resumed = Small()
    assert resumed.load(tmp_path) == 1
    assert resumed.weights().equal(expected)
    resumed.train(1)  # with the random state of then, and the moments
    assert resumed.weights().equal(small.weights())


def test_final_is_what_each_that_can_be_gone_back_to_contains(tmp_path: Path) -> None:
    """The start model too, while there are fewer than are kept."""
    small, saver = Small(), checkpoint.Saver(tmp_path, 2)
    said: list[int | None] = []
    for version in (3, 6, 9):
        saver.save(version, small.policy, small.optimizer)  # type: ignore[arg-type]
        saver.wait()
        said.append(saver.final())
    saver.close()
    assert said == [None, 3, 6]


def fill_the_disk(folder: Path, log: Path) -> None:
    """In a process of its own: the second of three checkpoints is more than it may write."""
    logging.basicConfig(filename=log, format="%(message)s", force=True)
    small, saver = Small(400), checkpoint.Saver(folder, 2)
    for version, most in ((1, resource.RLIM_INFINITY), (2, 100_000), (3, resource.RLIM_INFINITY)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        saver.save(version, small.policy, small.optimizer)  # type: ignore[arg-type]
        saver.wait()
    saver.close()


def test_a_disk_that_does_not_take_one_costs_a_line_and_the_next_is_tried(
    tmp_path: Path, processes: ForkServerContext
) -> None:
    folder, log = tmp_path / "checkpoints", tmp_path / "log"
    child = processes.Process(target=fill_the_disk, args=(folder, log))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert "checkpoint of version 2 was not written: " in log.read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["v00000001", "v00000003"]


def cut(part: float) -> Callable[[bytes], bytes]:
    return lambda whole: whole[: int(len(whole) * part)]


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize(
    "damage",
    [cut(0), cut(0.3), cut(0.99), lambda whole: b"\0" * len(whole), lambda whole: b"junk" * 99, lambda whole: b"junk"],
)
def test_a_damaged_one_is_passed_over_with_a_warning(
    tmp_path: Path, damage: Callable[[bytes], bytes], file: str, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small()
    small.save(tmp_path, 1)
    expected = small.weights()
    small.train(1)
    small.save(tmp_path, 2)
    path = tmp_path / "v00000002" / file
    path.write_bytes(damage(path.read_bytes()))
    resumed = Small()
    resumed.train(0)
    with caplog.at_level(logging.WARNING):
        assert resumed.load(tmp_path) == 1
    assert "v00000002 cannot be read, trying the one before" in caplog.text
    assert resumed.weights().equal(expected)
    resumed.save(tmp_path, 2)  # made again, it counts as whole
    assert Small().load(tmp_path) == 2


def save_for_ever(folder: Path, first: int, told: Connection) -> None:
    small = Small(1000)
    saver = checkpoint.Saver(folder, 2)
    for version in itertools.count(first):
        small.policy.model.weight.data.fill_(version)
        saver.save(version, small.policy, small.optimizer)  # type: ignore[arg-type]
        saver.wait()
        told.send(version)


def test_a_kill_while_saving_leaves_a_whole_one(tmp_path: Path, processes: ForkServerContext) -> None:
    """kill -9 at whatever moment: the newest that was reported as saved, or the one after it, loads."""
    chance = random.Random(1)
    last = 0
    for _ in range(12):
        here, there = processes.Pipe()
        child = processes.Process(target=save_for_ever, args=(tmp_path, last + 1, there))
        child.start()
        there.close()
        try:
            for _ in range(3):
                assert here.poll(60)
                last = here.recv()
            time.sleep(chance.uniform(0, 0.05))  # somewhere in what it does
        finally:
            child.kill()
            child.join()
        with contextlib.suppress(EOFError):
            while True:
                last = here.recv()
        found = Small(1000)
        version = found.load(tmp_path)
        assert version in (last, last + 1)
        assert found.weights().unique().tolist() == [version]
        assert not list(tmp_path.glob(".v*"))  # what was half written is gone
        assert not list(tmp_path.glob("*.damaged"))  # and never had the name of a whole one
        last = version
