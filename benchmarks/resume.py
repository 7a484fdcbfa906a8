"""Exact resume: the learner is killed (SIGKILL) at random moments, again and again, and the run is replayed at the end.

A real queue, a real learner with a tiny model, recorded batches. Every version that is made again must be published
with the checksum that it had before the kill. And what a checkpoint costs a step: written beside the training,
against written while training waits. The last line is one JSON object; with --json there is only that.

    python benchmarks/resume.py [--kills 20] [--seed 0] [--json]
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1] / "tests" / "learner")  # benchmarks/queue.py is no `queue`

import torch  # noqa: E402
from learner_run import ended, settings, until, world  # noqa: E402
from learner_world import save_tiny_model, save_tokenizer  # noqa: E402

from slipstream.config import RunDir  # noqa: E402
from slipstream.configfile import read_config  # noqa: E402
from slipstream.learner import checkpoint  # noqa: E402
from slipstream.learner.optimizer import Optimizer, learning_rate  # noqa: E402
from slipstream.learner.policy import Policy  # noqa: E402
from slipstream.learner.recording import read_recording  # noqa: E402
from slipstream.learner.replay import Replay  # noqa: E402

TESTS = Path(__file__).parents[1] / "tests" / "learner"
EVERY = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the last line only")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = resume(Path(folder), arguments.kills, arguments.seed) | stall(Path(folder))
    if not arguments.json:
        for name, value in found.items():
            print(f"{name}: {value}")
    print(json.dumps(found))
    return 0 if found["identical"] and not found["versions_that_differ"] else 1


def resume(folder: Path, kills: int, seed: int) -> dict[str, float | bool]:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["learner_processes"])
    model = save_tiny_model(folder / "model")
    save_tokenizer(model)
    root = folder / "run"
    root.mkdir()
    steps = 3 * kills
    asyncio.run(killed(root, model, steps, kills, random.Random(seed), processes))
    run_dir = RunDir(root)
    replay = Replay(read_config(run_dir.config, files=False), run_dir)
    versions = [step.version for step in replay]
    sums = read_recording(run_dir.journal).checksums
    return {
        "kills": kills,
        "versions": len(versions),
        "versions_made_again": run_dir.metrics.read_bytes().count(b"\n") - steps,
        "versions_that_differ": sum(len(each) > 1 for each in sums.values()),
        "identical": replay.verdict().identical and len(versions) == steps,
    }


async def killed(
    root: Path,
    model: Path,
    steps: int,
    kills: int,
    chance: random.Random,
    processes: multiprocessing.context.ForkServerContext,
) -> None:
    async with world(settings(model, steps=steps, every=EVERY), root, processes) as (here, _):
        for _ in range(kills):
            learner, before = here.start("learner"), len(here.metrics())
            # A step further each time: three on average would be lost, and it would never end.
            await until(lambda before=before: len(here.metrics()) > before + EVERY - 1)
            await asyncio.sleep(chance.uniform(0, 0.1))
            os.kill(learner.pid or 0, signal.SIGKILL)
            await ended(learner)
        assert await ended(here.start("learner")) == 0


def stall(folder: Path) -> dict[str, float]:
    """Milliseconds that a checkpoint of 25M parameters keeps the learner from training."""
    model = save_tiny_model(folder / "larger", hidden_size=512, intermediate_size=2048, num_hidden_layers=6)
    policy = Policy(model, chunk_tokens=64)
    optimizer = Optimizer(
        policy.parameters(),
        rate=learning_rate(1e-6, 0, 10, "constant"),
        clip_norm=1.0,
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0)  # so that there are moments
    waited, beside = list[float](), list[float]()
    saver = checkpoint.Saver(folder / "checkpoints", 1)
    for version in range(1, 6):
        began = time.monotonic()
        saver.save(version, policy, optimizer)
        beside.append(time.monotonic() - began)
        saver.wait()
        waited.append(time.monotonic() - began)
    saver.close()
    return {
        "parameters_m": round(sum(parameter.numel() for parameter in policy.parameters()) / 1e6, 1),
        "checkpoint_ms": round(1e3 * min(waited), 1),
        "stall_ms": round(1e3 * min(beside), 1),
        "stall_ratio": round(min(waited) / min(beside), 2),
    }


if __name__ == "__main__":
    sys.exit(main())
