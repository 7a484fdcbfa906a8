"""The command line: what a user typed is checked here, before anything starts.

Invariant: bad input ends with exit code 2 and one line that says what to change, never with a traceback. A command
imports what it needs when it runs, so that `--help` and errors are quick.
"""

import argparse
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from slipstream import checking, pages, reading, trying
from slipstream.claim import check_dir, claim, claimed, new_run_dir
from slipstream.config import Config, RunDir
from slipstream.configfile import field_help, read_config
from slipstream.errors import UserError
from slipstream.inputs import check_inputs, tasks_of
from slipstream.parent import die_with_supervisor
from slipstream.process import before_torch

log = logging.getLogger(__name__)

QUEUE_SECONDS = 60.0  # how long a rollouter or learner waits for the queue to be there at all


def main(argv: Sequence[str] | None = None) -> int:
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        return arguments.command(arguments)
    except UserError as error:
        sys.stderr.write(f"slipstream: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `slipstream show ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


# -- commands ------------------------------------------------------------------------------------------------------


def _run(arguments: argparse.Namespace) -> int:
    config = read_config(arguments.config, arguments.overrides)
    if arguments.dir:
        check_dir(RunDir(arguments.dir.resolve()), config)
    check_inputs(config)
    run_dir = RunDir(arguments.dir.resolve()) if arguments.dir else new_run_dir(config)
    from slipstream.launch import run

    with claimed(run_dir, config):
        return run(config, run_dir)


def _queue(arguments: argparse.Namespace) -> int:
    config, run_dir = _process(arguments)
    tasks, heldout = tasks_of(config)
    import uvloop

    from slipstream.queue import broker

    claim(run_dir, config)
    uvloop.run(broker.serve(config, run_dir, tasks, heldout))
    return 0


def _rollouter(arguments: argparse.Namespace) -> int:
    if arguments.connect:
        return _join(arguments)
    if arguments.config is None or arguments.dir is None:
        raise UserError("rollouter: write CONFIG and --dir RUN, or --connect URL on another machine")
    config, run_dir = _process(arguments)
    _await_queue(run_dir)
    from slipstream.rollouter import process

    return process.run(config, run_dir, arguments.name)


def _join(arguments: argparse.Namespace) -> int:
    """A rollouter on another machine: its config comes from the queue."""
    before_torch()
    from slipstream.queue.joining import joined

    key = f"#{arguments.key.resolve()}" if arguments.key else ""
    overrides = [str(arguments.config)] if arguments.config else []  # the first word that is no option
    with joined(arguments.connect + key, overrides + arguments.overrides) as (config, run_dir):
        from slipstream.rollouter import process

        return process.run(config, run_dir, arguments.name)


def _learner(arguments: argparse.Namespace) -> int:
    config, run_dir = _process(arguments)
    _await_queue(run_dir)
    from slipstream.learner import process

    return process.run(config, run_dir)


# -- what processes start with -----------------------------------------------------------------------------------


def _process(arguments: argparse.Namespace) -> tuple[Config, RunDir]:
    """What each of a run's processes starts with."""
    die_with_supervisor()
    before_torch()
    return read_config(arguments.config, arguments.overrides), RunDir(arguments.dir.resolve())


def _await_queue(run_dir: RunDir) -> None:
    began = time.monotonic()
    url = run_dir.root / "queue.url"
    while not url.is_file():
        waited = time.monotonic() - began
        if waited > QUEUE_SECONDS:
            raise UserError(
                f"--dir {run_dir.root}: no queue came up there; start `slipstream queue CONFIG --dir` first"
            )
        log.info("waiting for the queue for %.0f s because there is no %s", waited, url)
        time.sleep(1)


# -- the parser ----------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse takes positionals in one go: overrides that follow an option come back as unknown.
    if [word for word in rest if word.startswith("-")] or (rest and not hasattr(arguments, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="slipstream", description="Asynchronous RL for tool-using language-model agents.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(
        name: str, command: Callable[[argparse.Namespace], int], says: str, example: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=says,
            description=f"{says[0].upper()}{says[1:]}.",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(command=command)
        return sub

    run = add(
        "run", _run, "train: every process on this machine, supervised", "slipstream run config.toml run.steps=20"
    )
    run.add_argument(
        "--dir", type=Path, metavar="RUN", help="run directory; default runs/NAME-DATE-TIME; same again resumes"
    )
    run.epilog = f"{run.epilog}\n\n{field_help()}"
    queue = add("queue", _queue, "the queue process of a run", "slipstream queue config.toml --dir runs/a")
    rollouter = add(
        "rollouter", _rollouter, "one rollouter process of a run", "slipstream rollouter config.toml --dir runs/a"
    )
    name = f"rollouter-{platform.node()}-{os.getpid()}"
    rollouter.add_argument("--name", default=name, help="what the queue and the logs call it")
    rollouter.add_argument(
        "--connect", metavar="URL", help="instead of CONFIG and --dir: join the run whose queue is at tcp://HOST:PORT"
    )
    rollouter.add_argument("--key", type=Path, metavar="FILE", help="with --connect: a copy of the run's queue.key")
    learner = add("learner", _learner, "the learner process of a run", "slipstream learner config.toml --dir runs/a")
    for sub in (queue, rollouter, learner):
        sub.add_argument(
            "--dir",
            type=Path,
            metavar="RUN",
            required=sub is not rollouter,
            help="run directory, shared by all processes",
        )
    for sub in (run, queue, rollouter, learner):
        optional = "?" if sub is rollouter else None
        sub.add_argument("config", type=Path, metavar="CONFIG", help="TOML file", nargs=optional)
        sub.add_argument("overrides", nargs="*", metavar="key.sub=value", help="changes to the config")

    checking.add_commands(add)
    reading.add_commands(add)
    pages.add_commands(add)
    trying.add_commands(add)
    return parser
