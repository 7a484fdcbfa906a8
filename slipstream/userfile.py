"""Objects out of a user's Python file, named as FILE.py:NAME in the config.

Invariant: whatever is wrong (no file, no such name, an error while importing) is a UserError that names the config key.
"""

import difflib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

from slipstream.errors import UserError


def load_object(spec: str, key: str) -> Any:
    """The object NAME in FILE.py; `key` is the config key to name in errors. Imported once per process and file."""
    file, colon, name = spec.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise UserError(f"{key} = {spec!r}: write it as FILE.py:NAME")
    module = _module(Path(file).resolve(), spec, key)
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, [n for n in vars(module) if not n.startswith("_")], n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"{key} = {spec!r}: {Path(file).name} has no {name!r}{hint}")
    return getattr(module, name)


def _module(path: Path, spec: str, key: str) -> Any:
    if not path.is_file():
        raise UserError(f"{key} = {spec!r}: there is no file {path}")
    qualified = f"slipstream_user.{path}"
    if qualified in sys.modules:
        return sys.modules[qualified]
    if str(path.parent) not in sys.path:  # the file may import its neighbours
        sys.path.append(str(path.parent))
    found = importlib.util.spec_from_file_location(qualified, path)
    if found is None or found.loader is None:
        raise UserError(f"{key} = {spec!r}: {path} cannot be imported")
    module = importlib.util.module_from_spec(found)
    sys.modules[qualified] = module
    try:
        found.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[qualified]
        if isinstance(error, UserError):  # of a decorator: its words say what to write
            raise UserError(f"{key} = {spec!r}: line {last_line_in(path, error)}: {error}") from error
        if isinstance(error, Exception):
            said = " ".join(str(error).split())
            what = f"line {last_line_in(path, error)} raised {type(error).__name__}: {said}; mend it there"
            raise UserError(f"{key} = {spec!r}: {what}") from error
        raise
    return module


def last_line_in(path: Path, error: Exception) -> int | str:
    """The line of a user's file that an error came through last."""
    if isinstance(error, SyntaxError):
        return error.lineno or "?"
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path.resolve()
    ]
    return lines[-1] if lines and lines[-1] is not None else "?"
