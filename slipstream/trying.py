"""The commands that try settings out on the virtual clock: `simulate` and `advise`.

Invariant: as with all commands, what they need is imported when they run.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from slipstream.claim import existing
from slipstream.errors import UserError

Command = Callable[[argparse.Namespace], int]
AddCommand = Callable[[str, Command, str, str], argparse.ArgumentParser]


def add_commands(add: AddCommand) -> None:
    """`add`: name, command, what it says of itself, an example."""
    trial = add(
        "simulate",
        simulate,
        "the real gate and ledger on a virtual clock: how busy, how stale",
        "slipstream simulate batch=32 depth=3 cutoff=8 group=1 step_s=0.5 latency=lognormal:1.0,1.0 concurrency=128",
    )
    trial.add_argument("overrides", nargs="*", metavar="key=value", help="settings and times; --keys lists them")
    trial.add_argument("--keys", action="store_true", help="list the keys, with defaults and meanings")
    trial.add_argument("--run", type=Path, metavar="RUN", help="start from what this run measured of itself")
    advice = add(
        "advise",
        advise,
        "what to set in a run's config, and what that would give",
        "slipstream advise runs/a --svg advice.svg",
    )
    advice.add_argument("run", type=Path, metavar="RUN", help="run directory")
    for sub in (trial, advice):
        sub.add_argument("--json", action="store_true", help="as JSON")
        sub.add_argument("--svg", type=Path, metavar="FILE", help="write charts there too")


def simulate(arguments: argparse.Namespace) -> int:
    from slipstream.simulator import measured, read_scenario, simulate
    from slipstream.simulator.report import svg, table
    from slipstream.simulator.scenario import key_help

    if arguments.keys:
        return _say(key_help())
    start = measured(existing(arguments.run)).scenario if arguments.run else None
    scenario = read_scenario(arguments.overrides, start)
    result = simulate(scenario)
    if arguments.svg:
        _write(arguments.svg, svg(scenario, result))
    return _say(msgspec.json.encode(result).decode() if arguments.json else table(result))


def advise(arguments: argparse.Namespace) -> int:
    run_dir = existing(arguments.run)
    from slipstream.simulator.advisor import advise, svg, text

    advice = advise(run_dir)
    if arguments.svg:
        _write(arguments.svg, svg(advice))
    return _say(msgspec.json.encode(advice).decode() if arguments.json else text(advice))


def _say(text: str) -> int:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"--svg {path}: cannot be written: {error.strerror}; name another file") from error
