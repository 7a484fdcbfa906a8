"""Depth and corrections against the demo's reward, wall time and tokens: real runs of the calculator task.

Each cell is `slipstream run examples/calculator/config.toml` with its overrides, once a seed. What has run is kept in
--out and not run again, so a sweep may be stopped and gone on with. Writes OUT/sweep.md (a table) and OUT/sweep.svg.
The last line is one JSON object: reward and speed of each cell against depth 0; with --json there is only that.

    python benchmarks/sweep.py [--seeds 3] [--steps 65] [--cells depth-0,depth-2] [--out runs/sweep] [--json]
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # benchmarks/queue.py is no `queue`

from slipstream.config import RunDir  # noqa: E402
from slipstream.observe.metrics import read_metrics  # noqa: E402
from slipstream.simulator.picture import Line, Lines, picture  # noqa: E402

CELLS = {
    **{f"depth-{depth}": [f"staleness.depth={depth}", "staleness.cutoff=16"] for depth in ("0", "1", "2", "4", "8")},
    "depth-auto": ["staleness.depth=auto", "staleness.cutoff=16"],
    "none": ["staleness.depth=4", "staleness.cutoff=16", "correction.presets=[]"],
    "tis": ["staleness.depth=4", "staleness.cutoff=16", 'correction.presets=["tis"]'],
    "tis-mask": ["staleness.depth=4", "staleness.cutoff=16", 'correction.presets=["tis", "icepop"]'],
    "decoupled": [
        "staleness.depth=4",
        "staleness.cutoff=16",
        "learner.proximal=recompute",
        'correction.presets=["tis"]',
    ],
}


class Made(msgspec.Struct):
    """A run's numbers."""

    heldout: float  # pass rate at the end
    reward: list[float]  # by step
    seconds: list[float]  # from the first step on
    tokens: list[float]  # generated, at each step
    staleness: float
    ess: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=65)
    parser.add_argument("--cells", default=",".join(CELLS), help="which, with commas between")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "sweep")
    parser.add_argument("--json", action="store_true", help="print the last line only")
    arguments = parser.parse_args()
    names = arguments.cells.split(",")
    if unknown := sorted(set(names) - set(CELLS)):
        parser.error(f"--cells {unknown[0]}: is none of {', '.join(CELLS)}")
    make_start_model()
    found: dict[str, list[Made]] = {}
    for seed in range(arguments.seeds):  # all cells of a seed before the next: what is there compares
        for name in names:
            made = one_run(arguments.out / f"{name}-{arguments.steps}-{seed}", name, seed, arguments.steps)
            found.setdefault(name, []).append(made)
            if not arguments.json:
                print(f"{name}, seed {seed}: {row(name, [made])}", flush=True)
    (arguments.out / "sweep.md").write_text(table(found))
    (arguments.out / "sweep.svg").write_text(charts(found))
    if not arguments.json:
        print(table(found))
    print(json.dumps(ratios(found)))
    return 0


def make_start_model() -> None:
    command = [sys.executable, str(ROOT / "examples" / "calculator" / "demo.py"), "--start-model-only"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def one_run(folder: Path, name: str, seed: int, steps: int) -> Made:
    """Resumes what was cut off; leaves what is done."""
    run_dir = RunDir(folder)
    if not run_dir.summary.is_file():
        config = str(ROOT / "examples" / "calculator" / "config.toml")
        changes = [f"run.seed={seed}", f"run.steps={steps}", "observe.wandb=off", *CELLS[name]]
        command = [sys.executable, "-m", "slipstream", "run", config, "--dir", str(folder), *changes]
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".log").open("w") as log:
            if subprocess.run(command, stdout=log, stderr=log, check=False).returncode:
                raise SystemExit(f"{name}, seed {seed} failed; see {log.name}")
    steps_made = read_metrics(run_dir)
    summary = json.loads(run_dir.summary.read_bytes())
    return Made(
        heldout=summary["heldout_after"],
        reward=[step["reward/mean"] for step in steps_made],
        seconds=[step["time"] - steps_made[0]["time"] for step in steps_made],
        tokens=[step["tokens/generated"] for step in steps_made],
        staleness=summary["staleness_mean"],
        ess=statistics.fmean(step["is/ess"] for step in steps_made if "is/ess" in step),
    )


def row(name: str, made: list[Made]) -> str:
    def mean(values: list[float]) -> float:
        return statistics.fmean(values)

    return (
        f"| {name} | {mean([each.heldout for each in made]):.1%} | {mean([mean(each.reward) for each in made]):.3f} | "
        f"{mean([each.seconds[-1] for each in made]):.0f} | {mean([each.tokens[-1] for each in made]):,.0f} | "
        f"{mean([each.staleness for each in made]):.2f} | {mean([each.ess for each in made]):.3f} |"
    )


def table(found: dict[str, list[Made]]) -> str:
    head = "| | held-out | reward, mean of all steps | seconds of training | tokens generated | staleness | ESS |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *(row(name, made) for name, made in found.items())]) + "\n"


def charts(found: dict[str, list[Made]]) -> str:
    """Reward by time and by tokens; mean over seeds."""
    by_time, by_tokens = ([*_curves(found, axis)] for axis in ("seconds", "tokens"))
    return picture([_chart("Reward by time", "seconds", by_time), _chart("Reward by tokens", "tokens", by_tokens)])


POINTS = 20


def _chart(title: str, across: str, curves: list[tuple[str, list[float], list[float]]]) -> Lines:
    return Lines(title, "reward", across, curves[0][1], [Line(name, ys) for name, _, ys in curves])


def _curves(found: dict[str, list[Made]], axis: str) -> list[tuple[str, list[float], list[float]]]:
    """All on the same xs, up to where the shortest run ends."""
    ends = [getattr(each, axis)[-1] for made in found.values() for each in made]
    xs = [min(ends) * (point + 1) / POINTS for point in range(POINTS)]
    return [
        (name, xs, [statistics.fmean(_until(each, axis, x) for each in made) for x in xs])
        for name, made in found.items()
    ]


def _until(made: Made, axis: str, x: float) -> float:
    """Mean reward of the last steps (up to five) that were made by then."""
    there = [reward for at, reward in zip(getattr(made, axis), made.reward, strict=True) if at <= x]
    return statistics.fmean(there[-5:]) if there else made.reward[0]


def ratios(found: dict[str, list[Made]]) -> dict[str, float]:
    """Against depth 0, or the first cell where that was left out."""
    first = found.get("depth-0") or next(iter(found.values()))
    seconds = statistics.fmean(each.seconds[-1] for each in first)
    heldout = statistics.fmean(each.heldout for each in first)
    named: dict[str, float] = {}
    for name, made in found.items():
        named[f"{name}_speedup"] = round(seconds / statistics.fmean(each.seconds[-1] for each in made), 3)
        named[f"{name}_heldout"] = round(statistics.fmean(each.heldout for each in made) / max(1e-9, heldout), 3)
    return named


if __name__ == "__main__":
    sys.exit(main())
