"""The learner process with the real queue, over real sockets: it trains, is killed, is stopped, runs out of data."""

import asyncio
import os
import random
import re
import signal
from multiprocessing.context import ForkServerContext
from pathlib import Path

import msgspec
import psutil
import pytest
from learner_run import World, ended, settings, until, world

from slipstream.learner.groups import Seen
from slipstream.learner.policy import Policy
from slipstream.learner.recording import read_recording
from slipstream.learner.report import waiting_line
from slipstream.queue.client import QueueClient
from slipstream.weights_file import checksum, read_tensors

pytestmark = pytest.mark.asyncio
STEPS = 20
METRICS = """\
reward/mean reward/answer outcome/finished turns/mean length/mean length/max staleness/mean staleness/p99 staleness/max
tokens/generated tokens/trained tokens/masked_stale tokens/zero_signal tokens/failed groups/taken groups/zero_signal
groups/pass_rate mismatch/kl_k1 mismatch/kl_k3 mismatch/max_prob_diff is/ess is/weight_mean is/clipped_fraction
is/masked_fraction loss/policy loss/entropy grad/norm lr queue/trajectories queue/bytes queue/leases weights/publish_s
weights/pause_s weights/version time/learner/forward_backward time/learner/waiting_for_data time/learner/publishing
time/learner/other time/rollouter/generating throughput/generated_tok_s throughput/trained_tok_s
"""


async def test_killed_stopped_and_to_the_end(tiny_model: Path, tmp_path: Path, processes: ForkServerContext) -> None:
    """kill -9, then SIGTERM, then to the last step: versions made again are the same to the bit, the accounts hold."""
    async with world(settings(tiny_model, steps=STEPS), tmp_path, processes) as (here, client):
        learner = here.start("learner")
        await until(lambda: len(here.metrics()) >= 3 and here.saved())
        os.kill(learner.pid or 0, signal.SIGKILL)
        assert await ended(learner) == -signal.SIGKILL
        before, saved = len(here.metrics()), int(here.saved()[-1][1:])
        assert here.shared.exists()

        learner = here.start("learner")
        await until(lambda: len(here.metrics()) > before + 1)
        os.kill(learner.pid or 0, signal.SIGTERM)
        assert await ended(learner) == 0
        stopped_at = int(here.metrics()[-1]["step"])
        assert here.saved()[-1] == f"v{stopped_at:08d}"
        assert not here.shared.exists()

        assert await ended(here.start("learner")) == 0
        status = await client.status()
        rows = here.metrics()
        assert [int(row["step"]) for row in rows[:before]] == list(range(1, before + 1))
        again = [int(row["step"]) for row in rows[before:]]
        assert again == list(range(again[0], STEPS + 1))
        assert again[0] == saved + 1
        for version, sums in here.checksums.items():
            assert len(set(sums)) == 1, f"version {version} was made again, and differs"
        assert set(here.checksums) >= {0, STEPS}
        assert status.version == STEPS
        assert status.tokens.holds()
        assert status.trajectories.holds()
        assert status.refused == 0
        assert status.tokens.trained == rows[-1]["tokens/trained"] > 0
        assert status.tokens.zero_signal > 0
        assert status.tokens.failed["timeout"] > 0
        await the_last_version_can_be_had(here, client, tiny_model)
        assert not here.shared.exists()


async def test_killed_at_any_moment_it_publishes_every_version_once_more_to_the_bit(
    tiny_model: Path, tmp_path: Path, processes: ForkServerContext
) -> None:
    """kill -9 at random moments: while it starts, collects, steps, publishes, settles, saves."""
    chance = random.Random(3)
    async with world(settings(tiny_model, steps=STEPS, every=3), tmp_path, processes) as (here, client):
        for _ in range(4):
            learner, before = here.start("learner"), len(here.metrics())
            await until(lambda before=before: len(here.metrics()) > before)
            await asyncio.sleep(chance.uniform(0, 0.2))
            os.kill(learner.pid or 0, signal.SIGKILL)
            assert await ended(learner) == -signal.SIGKILL
        assert await ended(here.start("learner")) == 0
        status = await client.status()
        assert status.tokens.holds()
        assert status.refused == 0
    recording = read_recording(here.run_dir.journal)
    made_again = sum(1 for row in here.metrics()) - STEPS
    assert made_again > 0
    assert list(recording.checksums) == list(range(STEPS + 1))
    assert [version for version, sums in recording.checksums.items() if len(sums) > 1] == []


async def the_last_version_can_be_had(here: World, client: QueueClient, tiny_model: Path) -> None:
    """By a rollouter that comes when the learner is gone, and as an ordinary folder."""
    newest = (await client.weights(newer_than=-1, wait_s=0)).weights
    assert newest is not None
    assert newest.location.startswith(str(here.run_dir.weights))
    last = read_tensors(newest)
    assert checksum(last) == newest.checksum
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    final = here.run_dir.checkpoints / "final"
    exported = load_file(final / "model.safetensors")
    assert all(exported[name].equal(tensor) for name, tensor in last.items())
    assert AutoTokenizer.from_pretrained(final).chat_template
    start = Policy(tiny_model, chunk_tokens=8).tensors()
    assert not all(tensor.equal(start[name]) for name, tensor in last.items())


async def test_metrics_and_the_line_of_a_step(tiny_model: Path, tmp_path: Path, processes: ForkServerContext) -> None:
    async with world(settings(tiny_model, steps=3, every=0), tmp_path, processes) as (here, _):
        assert await ended(here.start("learner")) == 0
        row = here.metrics()[-1]
        assert [name for name in METRICS.split() if name not in row] == []
        assert {name.split("/")[-1] for name in row if name.startswith("time/learner/")} <= {
            *("forward_backward", "waiting_for_data", "publishing", "checkpoint", "other")
        }
        assert row["staleness/max"] <= 2
        assert row["reward/mean"] == pytest.approx(row["reward/answer"])
        assert row["weights/pause_s"] == pytest.approx(0.002)
        assert (row["tool/search/calls"], row["tool/search/errors"]) == (3, 1)
        assert row["tool/search/p99_s"] == pytest.approx(0.0083, rel=0.01)
        assert "step 3/3  reward " in (tmp_path / "learner.log").read_text()
        assert here.saved() == ["v00000003"]


async def test_when_the_data_ends_the_rest_is_trained_and_it_leaves(
    tiny_model: Path, tmp_path: Path, processes: ForkServerContext
) -> None:
    async with world(settings(tiny_model, steps=10_000, every=0), tmp_path, processes) as (here, client):
        learner = here.start("learner")
        await until(lambda: here.metrics())
        await client.drain(done=False)
        assert await ended(learner) == 0
        status = await client.status()
        assert status.tokens.holds()
        assert status.tokens.in_flight == 0
        assert "no more groups will come" in (tmp_path / "learner.log").read_text()
        assert (here.run_dir.checkpoints / "final" / "model.safetensors").is_file()


async def test_asked_to_stop_while_the_queue_is_away_it_leaves_and_nothing_is_trained_twice(
    tiny_model: Path, tmp_path: Path, processes: ForkServerContext
) -> None:
    async with world(settings(tiny_model, steps=STEPS, every=5), tmp_path, processes) as (here, client):
        queue, learner = here.children[0], here.start("learner")
        await until(lambda: len(here.metrics()) >= 2)
        await here.stop_rolling_out()
        while (await client.status()).trajectories.in_flight >= 4:  # noqa: ASYNC110 - a step may be on its way
            await asyncio.sleep(0.02)
        made = (await client.status()).version
        await until(lambda: len(here.metrics()) == made)  # else it may not know yet that its step was booked
        os.kill(queue.pid or 0, signal.SIGKILL)
        os.kill(learner.pid or 0, signal.SIGTERM)
        assert await ended(learner) == 0
        # It may have had nothing to say to the queue any more.
        assert re.search(r"leaves (without the queue|at version)", (tmp_path / "learner.log").read_text())
        assert here.saved()[-1] == f"v{len(here.metrics()):08d}"
        await ended(queue)
        here.resume_rolling_out(client)
        here.start("queue")
        assert await ended(here.start("learner")) == 0
        status = await client.status()
        assert status.version == STEPS
        assert status.tokens.holds()
        assert status.refused == 0
        assert all(len(set(sums)) == 1 for sums in here.checksums.values())


async def test_the_queue_may_die_and_come_back_at_any_step(
    tiny_model: Path, tmp_path: Path, processes: ForkServerContext
) -> None:
    """Also between a version and its booking: the learner waits for the queue, and goes on."""
    async with world(settings(tiny_model, steps=STEPS), tmp_path, processes) as (here, client):
        learner = here.start("learner")
        for rows in (1, 4, 8):
            await until(lambda rows=rows: len(here.metrics()) >= rows)
            queue = next(child for child in reversed(here.children) if child is not learner)
            os.kill(queue.pid or 0, signal.SIGKILL)
            await ended(queue)
            here.start("queue")
        assert await ended(learner) == 0
        status = await client.status()
        assert [int(row["step"]) for row in here.metrics()] == list(range(1, STEPS + 1))
        assert status.tokens.holds()
        assert status.refused == 0


async def test_what_it_says_while_there_is_nothing_to_train_on() -> None:
    from collections import Counter

    seen = [Seen(rewards=[0.0, 0.0], parts={}, lengths=[3, 3], turns=[1, 1], outcomes=["finished"] * 2)] * 5
    said = waiting_line(1, 4, 30.0, Counter(zero_signal=5), seen, "no complete group: 3 trajectories run")
    assert said == (
        "waiting for data for 30 s: 1 of 4 groups; dropped 5 zero_signal; pass rate 0.00: tasks are too hard, "
        "or raise rollout.group; no complete group: 3 trajectories run"
    )
    assert waiting_line(0, 4, 15.2, Counter(), [], "") == "waiting for data for 15 s: 0 of 4 groups"


async def test_sharded_over_two_ranks_it_trains_is_killed_and_goes_on_alone(
    tiny_model: Path, tmp_path: Path, processes: ForkServerContext
) -> None:
    """A rank that is killed takes the learner with it; at SIGTERM it saves; what two ranks saved, one goes on with."""
    alone = settings(tiny_model, steps=6)
    sharded = msgspec.structs.replace(alone, learner=msgspec.structs.replace(alone.learner, ranks=2))
    async with world(sharded, tmp_path, processes) as (here, client):
        learner = here.start("learner")
        await until(lambda: len(here.metrics()) >= 1)
        (other,) = psutil.Process(learner.pid).children()
        other.kill()
        assert await ended(learner) == 1
        assert "rank 1 of the learner ended" in (tmp_path / "learner.log").read_text()

        learner, before = here.start("learner"), len(here.metrics())
        await until(lambda: len(here.metrics()) > before)
        (other,) = psutil.Process(learner.pid).children()
        os.kill(learner.pid or 0, signal.SIGTERM)
        assert await ended(learner) == 0
        assert not other.is_running()
        stopped_at = int(here.metrics()[-1]["step"])
        assert here.saved()[-1] == f"v{stopped_at:08d}"

        here.configure(alone)
        assert await ended(here.start("learner")) == 0
        status = await client.status()
        assert int(here.metrics()[-1]["step"]) == status.version == 6
        assert status.tokens.holds()
        assert status.refused == 0
        await the_last_version_can_be_had(here, client, tiny_model)
