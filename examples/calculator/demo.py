"""`make demo`: make the start model (cached), then run asynchronous RL on it and say how it went.

python examples/calculator/demo.py --seed 3
"""

import argparse
import os
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

HERE = Path(__file__).parent
START_MODEL = HERE.parent.parent / ".cache" / "calculator-model"


# Threads that wait for work sleep: spinning, they take the core from whoever shares it. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def make_start_model(console: Console) -> None:
    """Under 90 seconds the first time, nothing afterwards."""
    from start_model import ensure_start_model

    began = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("supervised warm start", total=None)

        def on_step(step: int, steps: int, loss: float) -> None:
            progress.update(bar, completed=step, total=steps, description=f"supervised warm start, loss {loss:.3f}")
            if not console.is_terminal and (step % 100 == 0 or step == steps):
                console.print(f"supervised warm start: step {step}/{steps}, loss {loss:.3f}")

        made = ensure_start_model(START_MODEL, on_step)
    console.print(f"start model: {START_MODEL} ({f'made in {time.monotonic() - began:.0f} s' if made else 'cached'})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="decides task order and sampling")
    parser.add_argument("--dir", type=Path, help="run directory (default: runs/calculator-DATE-TIME)")
    parser.add_argument("--start-model-only", action="store_true", help="make the start model and stop")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="config overrides")
    arguments = parser.parse_args()
    make_start_model(Console())
    if arguments.start_model_only:
        return 0
    from slipstream.cli import main as slipstream

    where = ["--dir", str(arguments.dir)] if arguments.dir else []
    return slipstream(["run", str(HERE / "config.toml"), *where, f"run.seed={arguments.seed}", *arguments.overrides])


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    sys.exit(main())
