"""The queue against other ways to move trajectories, all on loopback, all in this run.

    python benchmarks/queue.py [--json] [--count 400] [--peers FOLDER]

Trajectories of 2k to 32k tokens with all columns. Ratios are of tokens a CPU second, summed over all processes that
take part, so that neither cores nor other work on the machine count. The last line is one JSON object; with --json
there is only that.

vs_ray, vs_lists, vs_transferqueue   ours / theirs; null where the peer is not there
tokens_per_s                         of ours, by the clock
p99_ms                               from a group's last delivery to its tensors, at half that pace
memory_ratio                         growth of the broker's memory / bytes that it holds
flatness                             cost of a trajectory with --held there / with a tenth of them

Ray and TransferQueue are not among this project's dependencies: `pip install --target FOLDER ray transferqueue` and
say --peers FOLDER, or have them installed here into a temporary one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# This file's name is that of a module of the standard library, which must not find this one.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

TRANSPORT = Path(__file__).resolve().parent / "transport"
WITH_DEPENDENCIES = ["ray", "omegaconf", "cloudpickle", "orjson", "pyvers", "importlib_metadata"]
ALONE = ["transferqueue==0.1.11", "tensordict==0.10.*"]  # torch and numpy are here already
SECONDS = 540


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the last line only")
    parser.add_argument("--count", type=int, default=400, help="trajectories, a multiple of 4")
    parser.add_argument("--held", type=int, default=100_000, help="trajectories that wait for a learner, for flatness")
    parser.add_argument("--peers", type=Path, help="folder with ray and transferqueue, as made by pip install --target")
    arguments = parser.parse_args()

    def say(line: str) -> None:
        if not arguments.json:
            print(line, flush=True)

    ours = cost(say, "ours", ["ours.py", "cost", str(arguments.count)])
    assert ours is not None
    lists = cost(say, "Python lists", ["python_lists.py", str(arguments.count)])
    with tempfile.TemporaryDirectory() as made:
        peers = arguments.peers or install(say, Path(made))
        ray = cost(say, "Ray, padded", ["ray_queue.py", str(arguments.count)], peers)
        transfer = cost(say, "TransferQueue", ["transferqueue.py", str(arguments.count)], peers)
    latency = measured(say, "latency", ["ours.py", "latency", str(arguments.count)])
    held = measured(say, "held", ["ours.py", "held", str(arguments.held)])
    rate = per_cpu_second(ours)
    result = {
        "vs_ray": rate / per_cpu_second(ray) if ray else None,
        "vs_lists": rate / per_cpu_second(lists) if lists else None,
        "vs_transferqueue": rate / per_cpu_second(transfer) if transfer else None,
        "tokens_per_s": ours["tokens"] / ours["wall_s"],
        "p99_ms": latency["p99_ms"] if latency else None,
        "memory_ratio": held["memory_ratio"] if held else None,
        "flatness": held["flatness"] if held else None,
    }
    print(json.dumps({name: value and float(f"{value:.4g}") for name, value in result.items()}))


def install(say: Callable[[str], None], folder: Path) -> Path | None:
    for more in (WITH_DEPENDENCIES, ["--no-deps", *ALONE]):
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *more]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            say("skipped: Ray and TransferQueue cannot be installed here")
            return None
    return folder


def cost(say: Callable[[str], None], name: str, command: list[str], peers: Path | None = None) -> dict[str, Any] | None:
    if name in ("Ray, padded", "TransferQueue") and peers is None:
        return None
    found = measured(say, name, command, peers)
    if found:
        say(f"{name}: {per_cpu_second(found) / 1e6:.2f} million tokens a CPU second")
    return found


def per_cpu_second(found: dict[str, Any]) -> float:
    return found["tokens"] / found["cpu_s"]


def measured(
    say: Callable[[str], None], name: str, command: list[str], peers: Path | None = None
) -> dict[str, Any] | None:
    """The JSON that one of `transport/` prints, or None, said, when it cannot."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    if peers is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(TRANSPORT), str(peers)])
    try:
        run = subprocess.run(
            [sys.executable, str(TRANSPORT / command[0]), *command[1:]],
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        )
    except subprocess.SubprocessError as error:
        say(f"skipped: {name}: {error}\n{getattr(error, 'stderr', '') or ''}")
        return None
    for line in run.stderr.splitlines():
        if line.startswith("CPU: "):
            say(f"{name}: {line}")
    return json.loads(run.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
