"""The directory of a run: made, found, and claimed by one run alone.

Invariant: a directory holds one run, whose config is in it; a run that differs, and a second supervisor of the same
one, are refused before anything in it has changed.
"""

import datetime
import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from slipstream.config import Config, RunDir
from slipstream.configfile import differing, read_config, write_config
from slipstream.errors import UserError


def new_run_dir(config: Config) -> RunDir:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        root = Path("runs").resolve() / f"{config.run.name}-{stamp}{suffix}"
        try:
            root.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"run directory {str(root)!r} cannot be made: {error.strerror}; write --dir RUN") from error
        return RunDir(root)
    raise UserError(f"runs/{config.run.name}-{stamp} and 98 more exist; write --dir RUN")


def check_dir(run_dir: RunDir, config: Config) -> None:
    """The directory is new or empty, or holds this very run, which then goes on."""
    root = run_dir.root
    try:
        if run_dir.config.is_file():
            other = differing(read_config(run_dir.config, files=False), config)
            if other:
                raise UserError(
                    f"--dir {root}: holds another run (it differs in {', '.join(other)}); write another --dir, or give "
                    f"{run_dir.config} to go on with that one"
                )
        elif root.exists() and any(entry.name != "lock" for entry in root.iterdir()):
            raise UserError(f"--dir {root}: is not empty and holds no run; write another --dir")
        there = next(path for path in (root, *root.parents) if path.exists())
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            raise UserError(f"--dir {root}: cannot be written: {there} is no folder to write in; write another --dir")
    except OSError as error:
        raise _unwritable(run_dir, error) from error


def claim(run_dir: RunDir, config: Config) -> None:
    """The directory is this run's from here on."""
    check_dir(run_dir, config)
    try:
        run_dir.root.mkdir(parents=True, exist_ok=True)
        if not run_dir.config.is_file():
            write_config(config, run_dir.config)
    except OSError as error:
        raise _unwritable(run_dir, error) from error


def _unwritable(run_dir: RunDir, error: OSError) -> UserError:
    return UserError(f"--dir {run_dir.root}: cannot be written: {error.strerror}; write another --dir")


@contextmanager
def claimed(run_dir: RunDir, config: Config) -> Generator[None]:
    """Claimed, and no other `slipstream run` works in it meanwhile."""
    try:
        run_dir.root.mkdir(parents=True, exist_ok=True)
        lock = (run_dir.root / "lock").open("a")
    except OSError as error:
        raise _unwritable(run_dir, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--dir {run_dir.root}: a run is going on there; stop it, or write another --dir") from None
        claim(run_dir, config)
        yield


def existing(path: Path) -> RunDir:
    run_dir = RunDir(path.resolve())
    if not run_dir.config.is_file():
        raise UserError(f"RUN = {str(path)!r}: it has no config.toml; name the directory of a run, such as runs/NAME")
    return run_dir
