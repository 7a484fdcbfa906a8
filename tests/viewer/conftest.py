"""Runs to view."""

from collections.abc import Callable
from pathlib import Path

import pytest
from viewer_world import HOSTILE, World

from slipstream.queue.messages import Fate
from slipstream.queue.tasks import heldout_group
from slipstream.trajectory import Outcome


@pytest.fixture
def world(models: Path, tmp_path: Path) -> World:
    return World(tmp_path / "run", models / "stable")


@pytest.fixture(scope="module")
def full(models: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    """One of every kind: trained and recorded, trained in part, without signal, failed, held-out, waiting, hostile."""
    return filled(World(tmp_path_factory.mktemp("full") / "run", models / "stable"))


def filled(world: World) -> World:
    make = world.trajectory
    world.publish(0)
    world.deliver(
        make(1, 0, said=["let me look", "it is 4"], versions=[0, 1], reward=1.0),
        make(2, 0, said=["no idea é"], versions=[0], reward=0.0),
        make(3, 1, said=["same"], versions=[0]),
        make(4, 1, said=["same"], versions=[0]),
    )
    world.settle(*(Fate(lease=lease, outcome="finished", zero_signal=4) for lease in (3, 4)))
    world.train(1, 1, cut=2)
    count = sum(world.made[1].sampled)
    learner = [value + 0.02 for value, flag in zip(world.made[1].logprobs, world.made[1].sampled, strict=True) if flag]
    world.record(1, {1: (0.7071, learner, [False, False] + [True] * (count - 2))})
    world.train(2, 2)  # not recorded
    world.deliver(make(5, 2, said=["slow"], outcome=Outcome.TIMEOUT, reward=None, error="too slow"), verdict="mask")
    world.deliver(make(6, heldout_group(0, 0), said=["held"], reward=0.5))
    world.deliver(make(7, 3, said=[HOSTILE, HOSTILE], asked=HOSTILE, tool="<b>bad</b>", error=HOSTILE))
    world.deliver(make(8, 4, said=["x" * 3000], asked="long " * 200))
    world.close()
    return world


@pytest.fixture
def view(capsys: pytest.CaptureFixture[str]) -> "Callable[..., tuple[int, str, str]]":
    """The command: its exit code and what it wrote."""
    from slipstream import cli

    def run(*argv: object) -> tuple[int, str, str]:
        code = cli.main(["view", *map(str, argv)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run
