"""Many random kills: runs of real processes with a cheap engine, struck by SIGKILL and SIGSTOP until the time is up.

After each run the journal is audited and the whole run is replayed: every version has to come out as it was published.
The last line is one JSON object; with --json there is only that. Exit code 1 if anything was wrong; its run is kept.

    python benchmarks/soak.py [--minutes 10] [--faults 8] [--seed 0] [--json]
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1] / "tests" / "faults")  # benchmarks/queue.py is no `queue`

from ordeal import KINDS, ROLES, Outcome, faults_of, inflict, outcome  # noqa: E402
from small_run import SmallRun, save_small_model  # noqa: E402

STEPS, PATIENCE = 40, 900.0  # a crowded machine takes minutes to start a learner


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="no run begins after so long")
    parser.add_argument("--faults", type=int, default=8, help="of one run")
    parser.add_argument("--seed", type=int, default=0, help="of what strikes, whom and when")
    parser.add_argument("--json", action="store_true", help="print the last line only")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    began = time.monotonic()
    outcomes: list[Outcome] = []
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    model = save_small_model(folder / "model")
    while time.monotonic() - began < arguments.minutes * 60:
        here = folder / f"run-{len(outcomes)}"
        here.mkdir()
        found = one_run(here, model, arguments.faults, chance)
        outcomes.append(found)
        if not arguments.json:
            strikes = ", ".join(f"{count} {name}" for name, count in sorted(found.inflicted.items()))
            print(f"run {len(outcomes)}: {strikes}; {'; '.join(found.wrong) or 'nothing wrong'}", flush=True)
        if not found.wrong:
            shutil.rmtree(here)
    wrong = sum(bool(found.wrong) for found in outcomes)
    if not wrong:
        shutil.rmtree(folder)
    print(json.dumps(totals(outcomes, time.monotonic() - began) | ({"kept": str(folder)} if wrong else {})))
    return 1 if wrong else 0


def one_run(folder: Path, model: Path, count: int, chance: random.Random) -> Outcome:
    kinds = [(chance.choice(ROLES), chance.choice(KINDS)) for _ in range(count)]
    run = SmallRun(folder, model, steps=STEPS, seed=chance.randrange(1 << 30))
    inflicted: Counter[str] = Counter()
    try:
        inflicted = inflict(faults_of(kinds, STEPS, chance), run, PATIENCE)
        code = run.process.wait(PATIENCE)
    except (TimeoutError, subprocess.TimeoutExpired) as late:
        return Outcome([f"{late}\n{run.said()}"], dict(inflicted))
    finally:
        run.end()
    if code != 0:
        return Outcome([f"exit code {code}\n{run.said()}"], dict(inflicted))
    return outcome(run, inflicted)


def totals(outcomes: list[Outcome], seconds: float) -> dict[str, object]:
    strikes: Counter[str] = Counter()
    for found in outcomes:
        strikes.update(found.inflicted)
    return {
        "minutes": round(seconds / 60, 1),
        "runs": len(outcomes),
        "runs_wrong": sum(bool(found.wrong) for found in outcomes),
        "kills": sum(count for name, count in strikes.items() if name.endswith("kill")),
        "stops": sum(count for name, count in strikes.items() if name.endswith("stop")),
        **{name.replace(" ", "_"): count for name, count in sorted(strikes.items())},
        "versions": STEPS * len(outcomes),
        "versions_made_again": sum(found.versions_made_again for found in outcomes),
        "trajectories": sum(found.trajectories for found in outcomes),
        "leases_returned": sum(found.leases_returned for found in outcomes),
        "duplicates": sum(found.duplicates for found in outcomes),
    }


if __name__ == "__main__":
    sys.exit(main())
