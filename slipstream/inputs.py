"""What a run is made of, checked before anything of it starts: environment, tasks, chat template.

Invariant: nothing here imports torch or starts a process.
"""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from slipstream.config import Config
from slipstream.errors import UserError

if TYPE_CHECKING:
    from slipstream.task import Task


def check_inputs(config: Config) -> None:
    """The environment loads, the tasks load, and the model's chat template can carry them. Raises UserError."""
    from slipstream.agent_loop.environment import load_environment
    from slipstream.agent_loop.renderer import create_renderer

    environment = load_environment(config.environment.path)
    tasks, _ = tasks_of(config)
    try:
        with _without_torch():
            renderer = create_renderer(config.model.path)
        prompt = renderer.start(environment.first_messages(tasks[0]), environment.tools)
    except UserError as error:  # a template's problem names the template's folder only
        said = str(error)
        raise UserError(said if said.startswith("model.path") else f"model.path: {said}") from error
    if len(prompt) >= config.engine.max_model_len:
        raise UserError(
            f"engine.max_model_len = {config.engine.max_model_len}: the first task's prompt alone has {len(prompt)} "
            "tokens; raise it, or shorten the system prompt"
        )


@contextmanager
def _without_torch() -> Generator[None]:
    """transformers imports torch if it can, which takes longer than all else here; tokenizers do without it."""
    if not {"torch", "transformers"}.isdisjoint(sys.modules):
        yield
        return
    level = "TRANSFORMERS_VERBOSITY"  # it would say that models cannot be had
    before = os.environ.get(level)
    os.environ[level] = "error"
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules["torch"]
        os.environ.pop(level)
        if before is not None:
            os.environ[level] = before


def tasks_of(config: Config) -> "tuple[list[Task], list[Task]]":
    from slipstream.task import load_tasks

    given, seed = config.tasks, config.run.seed
    train = load_tasks(given.train, "tasks.train", seed, bad_rows=given.bad_rows)
    if not given.heldout:
        return train, []
    return train, load_tasks(given.heldout, "tasks.heldout", seed, given.heldout_limit, given.bad_rows)
