"""The commands that start an engine without a run: `doctor` before one, `eval` of its model.

Invariant: as with all commands, what they need is imported when they run.
"""

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import msgspec

from slipstream.claim import existing
from slipstream.config import Config, RunDir
from slipstream.configfile import read_config
from slipstream.errors import UserError
from slipstream.inputs import check_inputs, tasks_of
from slipstream.process import before_torch
from slipstream.trying import AddCommand

if TYPE_CHECKING:
    from slipstream.rollouter.evaluation import Evaluation


def add_commands(add: AddCommand) -> None:
    """`add`: name, command, what it says of itself, an example."""
    doctor = add(
        "doctor",
        _doctor,
        "try a config before a run: template, tools, rewards, whether engine and learner agree; exit 1 if not",
        "slipstream doctor config.toml",
    )
    doctor.add_argument("config", type=Path, metavar="CONFIG", help="TOML file")
    evaluate = add(
        "eval",
        _eval,
        "pass@k and mean@k of a config's model, or of a run's, on its held-out tasks",
        "slipstream eval runs/a --samples 4",
    )
    evaluate.add_argument("config", type=Path, metavar="CONFIG|RUN", help="TOML file, or the directory of a run")
    evaluate.add_argument("--samples", type=_count, default=1, metavar="K", help="attempts at each task; default 1")
    evaluate.add_argument(
        "--version", metavar="N", help="of a run: which one; default latest, that of the newest checkpoint"
    )
    evaluate.add_argument("--json", action="store_true", help="as JSON")
    for sub in (doctor, evaluate):
        sub.add_argument("overrides", nargs="*", metavar="key.sub=value", help="changes to the config")


def _doctor(arguments: argparse.Namespace) -> int:
    config = read_config(arguments.config, arguments.overrides)
    _check(config)
    from slipstream.doctor import Verdict, examine

    worst = Verdict.OK
    with _libraries_aside():
        for finding in examine(config):
            sys.stdout.write(f"{finding.verdict:4}  {finding.what}: {finding.says}\n")
            sys.stdout.flush()
            worst = max(worst, finding.verdict, key=list(Verdict).index)
    return 1 if worst is Verdict.FAIL else 0


def _eval(arguments: argparse.Namespace) -> int:
    with _model(arguments) as config:
        _check(config)
        _, tasks = tasks_of(config)
        if not tasks:
            raise UserError("tasks.heldout = '': there is nothing to evaluate on; name a file of held-out tasks")
        from rich.console import Console
        from rich.progress import Progress

        from slipstream.rollouter.evaluation import attempt_all, evaluation

        samples: int = arguments.samples
        with _libraries_aside() as stderr, Progress(console=Console(file=stderr), transient=True) as progress:
            bar = progress.add_task("attempts", total=len(tasks) * samples)
            began = time.monotonic()
            ended = attempt_all(config, tasks, samples, on_ended=lambda _: progress.advance(bar))
        named = str(arguments.config) if arguments.config.is_dir() else config.model.path
        result = evaluation(named, ended, samples, time.monotonic() - began)
    sys.stdout.write((msgspec.json.encode(result).decode() if arguments.json else _text(result)) + "\n")
    sys.stdout.flush()
    return 0


def _check(config: Config) -> None:
    before_torch(logging.ERROR)
    import_module("torch")  # else the check goes without it, and transformers would not find it later either
    check_inputs(config)


@contextmanager
def _model(arguments: argparse.Namespace) -> Generator[Config]:
    """The config to evaluate; that of a run names a copy of its model, which is gone afterwards."""
    if not arguments.config.is_dir():
        if arguments.version is not None:
            raise UserError(f"--version {arguments.version}: {arguments.config} is no run; leave it out, or name a run")
        yield read_config(arguments.config, arguments.overrides)
        return
    run_dir = existing(arguments.config)
    with tempfile.TemporaryDirectory(prefix="slipstream-eval-") as parent:
        folder = Path(parent) / "model"
        _export(run_dir, arguments.version or "latest", folder)
        yield read_config(run_dir.config, [*arguments.overrides, f"model.path={folder}"])


def _export(run_dir: RunDir, version: str, folder: Path) -> None:
    """In a process of its own: an engine cannot be forked from one that has computed with torch."""
    command = [sys.executable, "-m", "slipstream", "export", str(run_dir.root), "--version", version]
    ended = subprocess.run([*command, "--out", str(folder)], capture_output=True, text=True, check=False)
    said = ended.stderr.strip().rpartition("\n")[2]
    if ended.returncode == 2:
        raise UserError(said.removeprefix("slipstream: "))
    if ended.returncode:
        raise RuntimeError(f"`slipstream export` ended with exit code {ended.returncode}: {ended.stderr[-2000:]}")
    sys.stderr.write(ended.stdout)


@contextmanager
def _libraries_aside() -> Generator[TextIO]:
    """What libraries write to stderr, of this process and those it starts, is shown only when something fails. Yields
    the real one."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as aside, os.fdopen(os.dup(2), "w") as real:
        os.dup2(aside.fileno(), 2)
        try:
            yield real
        except Exception:
            aside.seek(0)
            real.write(aside.read().decode(errors="replace"))
            raise
        finally:
            os.dup2(real.fileno(), 2)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of attempts; write 1 or more")
    return int(text)


def _text(result: "Evaluation") -> str:
    outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in result.outcomes.items())
    return "\n".join(
        [
            f"model       {result.model}",
            f"attempts    {result.samples:,} at each of {result.tasks:,} tasks: {outcomes}",
            *(f"pass@{k:<6} {share:.1%}" for k, share in result.pass_at.items()),
            f"mean@{result.samples:<6} {result.mean_at_k:.1%}",
            f"reward      {result.mean_reward:.3f}",
            f"turns       {result.turns_mean:.1f} an attempt",
            f"tool calls  {result.tool_calls:,}, {result.tool_errors:,} of them errors",
            f"tokens      {result.tokens:,} sampled, {result.seconds:.0f} s with the engine's start",
        ]
    )
