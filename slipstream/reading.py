"""The commands that read what a run left: `accounts`, `status`, `show`, `view`, `export` and `replay`.

Invariant: as with all commands, what they need is imported when they run; nothing in the run directory changes
(`view` makes RUN/view, which is no part of the run).
"""

import argparse
import functools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slipstream.claim import existing
from slipstream.config import Config, RunDir
from slipstream.configfile import read_config
from slipstream.errors import UserError
from slipstream.process import before_torch
from slipstream.trying import AddCommand

if TYPE_CHECKING:
    from slipstream.queue import RunAccounts

SAY_SECONDS = 5.0


def add_commands(add: AddCommand) -> None:
    """`add`: name, command, what it says of itself, an example."""
    accounts = add(
        "accounts",
        _accounts,
        "where every token of a run went; exit 1 if it does not add up",
        "slipstream accounts runs/a --json",
    )
    accounts.add_argument("--json", action="store_true", help="as JSON")
    status = add(
        "status",
        _status,
        "what each process of a run does and waits for; of a run that ended, its summary",
        "slipstream status runs/a",
    )
    show = add(
        "show",
        _show,
        "one trajectory, in colour; tokens not trained on are grey",
        "slipstream show runs/a --trajectory 7",
    )
    show.add_argument("--trajectory", type=int, required=True, metavar="N", help="its lease number")
    view = add(
        "view",
        _view,
        "pages that show all trajectories, token by token, in a browser; without a server",
        "slipstream view runs/a --trajectory 7",
    )
    view.add_argument("--trajectory", type=int, metavar="N", help="open at this one, by its lease number")
    view.add_argument("--out", type=Path, metavar="FOLDER", help="folder to make; default RUN/view")
    view.add_argument(
        "--replay", action="store_true", help="compute the learner's numbers again, where the run did not record them"
    )
    view.add_argument(
        "--model", metavar="FOLDER", help="folder of the tokenizer, when model.path is not there any more"
    )
    export = add(
        "export",
        _export,
        "a version as an ordinary Hugging Face folder",
        "slipstream export runs/a --out models/a",
    )
    export.add_argument("--out", type=Path, metavar="FOLDER", required=True, help="folder to make")
    export.add_argument(
        "--version", default="latest", metavar="N", help="which one; default latest, that of the newest checkpoint"
    )
    replay = add(
        "replay",
        _replay,
        "the learner again over a run's recorded batches; exit 1 if it makes other versions",
        "slipstream replay runs/a loss.name=cispo 'correction.presets=[]'",
    )
    replay.add_argument("--json", action="store_true", help="as JSON")
    for sub in (accounts, status, show, view, export, replay):
        sub.add_argument("run", type=Path, metavar="RUN", help="run directory")
    replay.add_argument("overrides", nargs="*", metavar="key.sub=value", help="changes to the learner's config")


def _accounts(arguments: argparse.Namespace) -> int:
    run_dir = existing(arguments.run)
    from slipstream.queue import accounts

    counts: RunAccounts = accounts(run_dir)
    if arguments.json:
        said = msgspec.json.encode({**msgspec.to_builtins(counts), "holds": counts.holds()}).decode()
    else:
        said = _accounts_table(counts)
    sys.stdout.write(said + "\n")
    sys.stdout.flush()
    return 0 if counts.holds() else 1


def _status(arguments: argparse.Namespace) -> int:
    run_dir = existing(arguments.run)
    from rich.console import Console

    from slipstream.launch.status import show_status

    return show_status(read_config(run_dir.config, files=False), run_dir, Console())


def _show(arguments: argparse.Namespace) -> int:
    run_dir = existing(arguments.run)
    from slipstream.observe.show import show
    from slipstream.queue import delivered_leases, read_trajectories

    lease: int = arguments.trajectory
    leases = delivered_leases(run_dir.journal)
    if lease not in leases:
        there = f"its {len(leases)} go from {min(leases)} to {max(leases)}" if leases else "it has none"
        raise UserError(f"--trajectory {lease}: the run has no trajectory of this number; {there}")
    model = read_config(run_dir.config, files=False).model.path
    show(next(read_trajectories(run_dir.journal, {lease})), model)
    sys.stdout.flush()
    return 0


def _view(arguments: argparse.Namespace) -> int:
    run_dir = existing(arguments.run)
    from slipstream.viewer.build import Wanted, build

    config = read_config(run_dir.config, files=False)
    wanted = Wanted(
        out=(arguments.out or run_dir.view).resolve(),
        model=arguments.model or config.model.path,
        steps=run_dir.steps,
        start=arguments.trajectory,
    )
    with tempfile.TemporaryDirectory() as folder:
        if arguments.replay:
            steps = Path(folder)
            wanted = msgspec.structs.replace(wanted, steps=steps, replayed=_replayed(config, run_dir, steps))
        index = build(config, run_dir, wanted, _progress("trajectories"))
    at = f"#trajectory={arguments.trajectory}" if arguments.trajectory is not None else ""
    sys.stdout.write(f"{index.as_uri()}{at}\n")
    return 0


def _replayed(config: Config, run_dir: RunDir, steps: Path) -> str:
    """What the replay says of itself; its numbers are in `steps`."""
    before_torch()
    from slipstream.learner.replay import Replay
    from slipstream.observe.steps import write_step

    replay = Replay(config, run_dir, record=functools.partial(write_step, steps))
    progress = _progress("steps replayed")
    for step in replay:
        progress(step.version, replay.last)
    verdict = replay.verdict()
    if verdict.identical:
        return "computed again by a replay, which made the run's very versions"
    return f"computed again by a replay, which from version {verdict.first_difference} on differs from the run"


def _progress(what: str) -> Callable[[int, int], None]:
    """Says on stderr how far it is: over and over in one line on a terminal, every few seconds elsewhere."""
    terminal, said = sys.stderr.isatty(), time.monotonic()

    def say(done: int, of: int) -> None:
        nonlocal said
        if terminal:
            sys.stderr.write(f"\r{done:,} of {of:,} {what}{chr(10) if done == of else ''}")
        elif time.monotonic() - said > SAY_SECONDS:
            said = time.monotonic()
            sys.stderr.write(f"{done:,} of {of:,} {what}\n")
        sys.stderr.flush()

    return say


def _export(arguments: argparse.Namespace) -> int:
    run_dir = existing(arguments.run)
    before_torch()
    from slipstream.learner.export import export

    made = export(read_config(run_dir.config, files=False), run_dir, arguments.version, arguments.out)
    checked = "as it was published" if made.checked else "the journal does not say what was published"
    sys.stdout.write(f"version {made.version} is in {arguments.out} (checksum {made.checksum}: {checked})\n")
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    run_dir = existing(arguments.run)
    before_torch()
    from slipstream.learner.comparison import show
    from slipstream.learner.replay import Replay

    config = read_config(run_dir.config, arguments.overrides, files=False)
    verdict = show(Replay(config, run_dir, arguments.overrides), sys.stdout, as_json=arguments.json)
    return 0 if verdict.identical or verdict.changed else 1


def _accounts_table(counts: "RunAccounts") -> str:
    both = (counts.trajectories, counts.tokens)
    failed = sorted({outcome for each in both for outcome in each.failed})
    rows = [(name, [getattr(each, name) for each in both]) for name in _plain_counts(both[0])]
    rows += [(f"failed: {outcome}", [each.failed.get(outcome, 0) for each in both]) for outcome in failed]
    lines = [f"{'':24}{'trajectories':>14}{'tokens':>14}"]
    lines += [f"{name.replace('_', ' '):24}{numbers[0]:>14,}{numbers[1]:>14,}" for name, numbers in rows]
    leases, space = counts.leases, counts.space
    returned = ", ".join(f"{number:,} {reason}" for reason, number in sorted(leases.returned.items())) or "none"
    lines += [
        f"leases: {leases.granted:,} granted, {leases.delivered:,} delivered, {leases.running:,} running; "
        f"returned: {returned}",
        f"tokens lost under returned leases: {leases.tokens_lost:,}; duplicate deliveries: {leases.duplicates:,}",
        f"journal: {space.trajectories / 1e6:,.1f} MB of trajectories, {space.living / 1e6:,.1f} of them not final; "
        f"ledger {space.ledger / 1e6:,.1f} MB",
        "the accounts hold: generated is the sum of the rest" if counts.holds() else "THE ACCOUNTS DO NOT HOLD",
    ]
    return "\n".join(lines)


def _plain_counts(accounts: msgspec.Struct) -> list[str]:
    return [name for name in accounts.__struct_fields__ if name != "failed"]
