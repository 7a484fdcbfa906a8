"""A task: what the agent is asked, and what the reward needs. It travels inside a lease."""

import msgspec


class Task(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One row of a dataset.

    `prompt` is the user's message, or a list of chat messages (`{"role": ..., "content": ...}`). Everything else in
    the row that a reward may need (the right answer, test cases) is in `answer` and `extra`.
    """

    id: str
    prompt: str | list[dict[str, str]]
    answer: str = ""
    extra: dict[str, str | int | float | bool | None] = msgspec.field(default_factory=dict)
