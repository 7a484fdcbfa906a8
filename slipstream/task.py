"""A task: what the agent is asked, and what the reward needs. It travels inside a lease.

Invariant: a Task that was loaded has an id of its own and a prompt; a row without is refused with its file and line.
"""

import itertools
import logging
import random
from collections.abc import Callable
from typing import Any, Literal, cast

import msgspec

from slipstream.errors import UserError
from slipstream.rows import parts, read_rows

log = logging.getLogger(__name__)


class Task(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One row of a dataset.

    `prompt` is the user's message, or a list of chat messages (`{"role": ..., "content": ...}`). Everything else in
    the row that a reward may need (test cases, a source) is in `extra`.
    """

    id: str
    prompt: str | list[dict[str, str]]
    answer: str = ""
    extra: dict[str, Any] = {}
    source: str = ""  # the dataset that it comes from, where there are several

    def messages(self) -> list[dict[str, Any]]:
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return [dict(message) for message in self.prompt]


def load_tasks(
    spec: str, key: str, seed: int, limit: int | None = None, bad_rows: Literal["stop", "skip"] = "stop"
) -> list[Task]:
    """Tasks of a `.jsonl` or `.parquet` file, of a Hugging Face dataset folder, of `FILE.py:FUNCTION` called with the
    seed, or of several, joined by ` + `, each with ` * WEIGHT` behind it if need be. Raises UserError naming `key`.
    """
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    bad: list[str] = []
    datasets = parts(spec, key)
    for part in datasets:
        rows = itertools.islice(read_rows(part.path, key, seed), limit)
        found: list[Task] = []
        for where, row in rows:
            try:
                task = _read(row, where, seen)
            except ValueError as error:
                if bad_rows == "stop":
                    raise UserError(f"{key}: {where} {error}") from error
                bad.append(f"{where} {error}")
                continue
            seen[task.id] = where
            if len(datasets) > 1:
                task.source = part.path
            found.append(task)
        tasks += weighed(found, part.weight, random.Random(f"{seed}/{part.path}"))
    if bad:
        log.warning("%s: %d rows were skipped (tasks.bad_rows), the first: %s", key, len(bad), "; ".join(bad[:3]))
    if not tasks:
        raise UserError(f"{key} = {spec!r} has no tasks" + (f": all {len(bad)} rows are bad, {bad[0]}" if bad else ""))
    return tasks[:limit]


def weighed(tasks: list[Task], weight: float, rng: random.Random) -> list[Task]:
    """Each task `weight` times; of a fraction, as many as it comes to, drawn by chance and kept in order."""
    whole, rest = divmod(weight, 1.0)
    drawn = set(rng.sample(range(len(tasks)), round(rest * len(tasks))))
    copies = [(task, int(whole) + (index in drawn)) for index, task in enumerate(tasks)]
    return [
        task if copy == 0 else msgspec.structs.replace(task, id=f"{task.id} ({copy + 1})")
        for task, count in copies
        for copy in range(count)
    ]


def _read(row: Callable[[], object], where: str, seen: dict[str, str]) -> Task:
    """A row as a task of its own. Raises ValueError: what is wrong, to be read after where it stands."""
    read = row()
    task = _checked(read if isinstance(read, Task) else _task(read, where))
    if task.id in seen:
        raise ValueError(f"has the id {task.id!r} of {seen[task.id]}; ids must differ")
    return task


def _task(row: object, where: str) -> Task:
    if not isinstance(row, dict):
        raise ValueError('is no object; write {"prompt": ..., "answer": ...}')
    fields = cast("dict[str, Any]", row)
    if "prompt" not in fields:
        raise ValueError(f'has no "prompt" (it has {", ".join(map(str, fields)) or "nothing"})')
    answer = fields.get("answer", _ground_truth(fields))
    known = {
        "id": str(fields.get("id", where)),
        "prompt": fields["prompt"],
        "answer": answer if isinstance(answer, str) else msgspec.json.encode(answer).decode(),
        "extra": {name: value for name, value in fields.items() if name not in ("id", "prompt", "answer")},
    }
    try:
        return msgspec.convert(known, Task)
    except msgspec.ValidationError as error:
        raise ValueError(f"has a wrong value: {error}") from error


def _ground_truth(fields: dict[str, Any]) -> object:
    """verl's rows have the answer here."""
    model = fields.get("reward_model")
    return cast("dict[str, Any]", model).get("ground_truth", "") if isinstance(model, dict) else ""


def _checked(task: Task) -> Task:
    if not task.prompt:
        raise ValueError('has an empty "prompt"; write what the agent is asked')
    for message in task.messages():
        if "role" not in message or "content" not in message:
            raise ValueError(f'has a message in "prompt" without "role" or "content": {message}')
    try:
        msgspec.json.encode(task)  # it travels inside leases
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"cannot be written as JSON: {error}") from error
    return task
