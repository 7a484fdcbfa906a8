"""A task: what the agent is asked, and what the reward needs. It travels inside a lease.

Invariant: a Task that was loaded has an id of its own and a prompt; a row without is refused with its file and line.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from slipstream.errors import UserError
from slipstream.userfile import load_object


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
        task = row if isinstance(row, Task) else _task(row, where, len(tasks), key)
        if task.id in seen:
            raise UserError(f"{key}: {where}: id {task.id!r} is that of {seen[task.id]} too; ids must differ")
        seen[task.id] = where
        tasks.append(task)
    if not tasks:
        raise UserError(f"{key} = {spec!r} has no tasks")
    return tasks


def _read_jsonl(spec: str, key: str) -> Iterator[tuple[str, Any]]:
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
            except msgspec.DecodeError as error:
                raise UserError(f"{key}: {where} is not JSON: {error}") from error


def _generate(spec: str, key: str, seed: int) -> Iterator[tuple[str, Any]]:
    function = load_object(spec, key)
    if not callable(function):
        raise UserError(f"{key} = {spec!r}: it is no function; write one that takes the seed and yields tasks")
    rows = function(seed)
    if not isinstance(rows, Iterable):
        raise UserError(f"{key} = {spec!r} returned {type(rows).__name__}; yield tasks, or return a list of them")
    for number, row in enumerate(rows, 1):
        yield f"{spec.rpartition(':')[2]} row {number}", row


def _task(row: Any, where: str, index: int, key: str) -> Task:
    if not isinstance(row, dict):
        raise UserError(f'{key}: {where} is no object; write {{"prompt": ..., "answer": ...}}')
    if not row.get("prompt"):
        raise UserError(f'{key}: {where} has no "prompt" (it has {", ".join(map(str, row)) or "nothing"})')
    answer = row.get("answer", "")
    known = {
        "id": str(row.get("id", index)),
        "prompt": row["prompt"],
        "answer": answer if isinstance(answer, str) else msgspec.json.encode(answer).decode(),
        "extra": {name: value for name, value in row.items() if name not in ("id", "prompt", "answer")},
    }
    try:
        return msgspec.convert(known, Task)
    except msgspec.ValidationError as error:
        raise UserError(f"{key}: {where}: {error}") from error
