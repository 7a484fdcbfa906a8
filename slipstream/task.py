"""A task: what the agent is asked, and what the reward needs. It travels inside a lease.

Invariant: a Task that was loaded has an id of its own and a prompt; a row without is refused with its file and line.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec

from slipstream.errors import UserError
from slipstream.userfile import last_line_in, load_object


class Task(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One row of a dataset.

    `prompt` is the user's message, or a list of chat messages (`{"role": ..., "content": ...}`). Everything else in
    the row that a reward may need (test cases, a source) is in `extra`.
    """

    id: str
    prompt: str | list[dict[str, str]]
    answer: str = ""
    extra: dict[str, Any] = {}

    def messages(self) -> list[dict[str, Any]]:
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return [dict(message) for message in self.prompt]


def load_tasks(spec: str, key: str, seed: int, limit: int | None = None) -> list[Task]:
    """Tasks of a `.jsonl` file, or of `FILE.py:FUNCTION` called with the seed. Raises UserError naming `key`."""
    rows = _read_jsonl(spec, key) if spec.endswith(".jsonl") else _generate(spec, key, seed)
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    for where, row in itertools.islice(rows, limit):
        task = _checked(row if isinstance(row, Task) else _task(row, where, key), where, key)
        if task.id in seen:
            raise UserError(f"{key}: {where}: id {task.id!r} is that of {seen[task.id]} too; ids must differ")
        seen[task.id] = where
        tasks.append(task)
    if not tasks:
        raise UserError(f"{key} = {spec!r} has no tasks")
    return tasks


def _read_jsonl(spec: str, key: str) -> Iterator[tuple[str, object]]:
    path = Path(spec)
    if not path.is_file():
        raise UserError(f"{key} = {spec!r}: there is no such file")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path.name} line {number}"
            try:
                yield where, msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                raise UserError(f"{key}: {where} is not JSON: {error}") from error


def _generate(spec: str, key: str, seed: int) -> Iterator[tuple[str, object]]:
    function = load_object(spec, key)
    if not callable(function):
        raise UserError(f"{key} = {spec!r}: it is no function; write one that takes the seed and yields tasks")
    file, _, name = Path(spec).name.rpartition(":")
    try:
        rows = function(seed)
        if not isinstance(rows, Iterable):
            raise UserError(f"{key} = {spec!r} returned {type(rows).__name__}; yield tasks, or return a list of them")
        for number, row in enumerate(cast("Iterable[object]", rows), 1):
            yield f"{file}:{name} row {number}", row
    except UserError:
        raise
    except Exception as error:
        line = last_line_in(Path(spec.rpartition(":")[0]), error)
        raise UserError(f"{key} = {spec!r}: line {line} raised {type(error).__name__}: {error}") from error


def _task(row: object, where: str, key: str) -> Task:
    if not isinstance(row, dict):
        raise UserError(f'{key}: {where} is no object; write {{"prompt": ..., "answer": ...}}')
    fields = cast("dict[str, Any]", row)
    if "prompt" not in fields:
        raise UserError(f'{key}: {where} has no "prompt" (it has {", ".join(map(str, fields)) or "nothing"})')
    answer = fields.get("answer", "")
    known = {
        "id": str(fields.get("id", where)),
        "prompt": fields["prompt"],
        "answer": answer if isinstance(answer, str) else msgspec.json.encode(answer).decode(),
        "extra": {name: value for name, value in fields.items() if name not in ("id", "prompt", "answer")},
    }
    try:
        return msgspec.convert(known, Task)
    except msgspec.ValidationError as error:
        raise UserError(f"{key}: {where}: {error}") from error


def _checked(task: Task, where: str, key: str) -> Task:
    if not task.prompt:
        raise UserError(f'{key}: {where} has an empty "prompt"; write what the agent is asked')
    for message in task.messages():
        if "role" not in message or "content" not in message:
            raise UserError(f'{key}: {where}: each message of "prompt" needs a "role" and a "content", not {message}')
    try:
        msgspec.json.encode(task)  # it travels inside leases
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(f"{key}: {where} cannot be written as JSON: {error}") from error
    return task
