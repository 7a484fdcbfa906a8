"""A run to report on: four steps, evaluations, one of every fate that charts tell apart."""

import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "viewer"))
from viewer_world import World

from slipstream.configfile import write_config
from slipstream.observe.metrics import MetricsWriter
from slipstream.queue.tasks import heldout_group
from slipstream.trajectory import Outcome


def metrics_of(step: int) -> dict[str, float]:
    """The learner's clock begins anew at step 3: it was started again."""
    clock = step if step < 3 else step - 2
    return {
        "reward/mean": 0.2 * step,
        "reward/exact": 0.2 * step,
        "groups/pass_rate": 0.1 * step,
        "groups/taken": 4.0,
        "groups/zero_signal": 1.0,
        "groups/discarded_stale": 0.0,
        "outcome/finished": 9.0,
        "outcome/timeout": 1.0,
        "loss/entropy": 1.0 / step,
        "loss/clip_fraction": 0.01,
        "grad/norm": 2.0,
        "staleness/mean": 0.5,
        "staleness/p99": 2.0,
        "staleness/max": 2.0,
        "mismatch/kl_k3": 1e-4,
        "is/ess": 1.0000001,
        "is/clipped_fraction": 0.0,
        "is/masked_fraction": 0.02,
        "tokens/generated": 100.0 * step,
        "tokens/trained": 60.0 * step,
        "tokens/masked_stale": 3.0 * step,
        "tokens/masked_mismatch": 2.0 * step,
        "tokens/zero_signal": 20.0 * step,
        "tokens/discarded_stale": 0.0,
        "tokens/failed": 5.0 * step,
        "queue/trajectories": 7.0,
        "queue/leases": 8.0,
        "queue/groups_ready": 1.0,
        "weights/publish_s": 0.01,
        "weights/pause_s": 0.05,
        "tool/look/calls": 5.0 * step,
        "tool/look/errors": 1.0 * step,
        "tool/look/p50_s": 0.01,
        "tool/look/p99_s": 0.02,
        "time/learner/forward_backward": 3.0 * clock,
        "time/learner/waiting_for_data": 1.0 * clock,
        "time/rollouter/generating": 4.0 * step,
        "time/rollouter/no_lease": 1.0 * step,
        "throughput/generated_tok_s": 500.0,
        "throughput/trained_tok_s": 300.0,
    }


def filled(world: World, steps: int) -> World:
    write_config(world.config, world.run_dir.config)
    writer = MetricsWriter(world.run_dir, quiet(world))
    for step in range(1, steps + 1):
        writer.log(step, metrics_of(step))
    writer.close()
    make = world.trajectory
    world.publish(0)
    world.deliver(
        make(1, heldout_group(0, 0), said=["held"], reward=1.0), make(2, heldout_group(0, 1), said=["held"], reward=0.5)
    )
    for step in range(1, steps + 1):
        first = 10 * step
        world.deliver(
            make(first, step, said=["let me look", "it is 4"], versions=[max(0, step - 2), step - 1], reward=1.0),
            make(first + 1, step, said=["no idea"], versions=[step - 1], reward=0.0),
        )
        world.train(step, first, first + 1)
    world.deliver(make(5, 99, said=["slow"], outcome=Outcome.TIMEOUT, reward=None, error="too slow"), verdict="mask")
    return world


def quiet(world: World):
    return msgspec.structs.replace(world.config, observe=msgspec.structs.replace(world.config.observe, wandb="off"))


@pytest.fixture
def world(models: Path, tmp_path: Path) -> World:
    return World(tmp_path / "run", models / "stable")


@pytest.fixture
def full(world: World) -> World:
    filled(world, 4)
    world.close()
    return world
