from array import array
from collections.abc import Callable
from typing import Any

import pytest

from slipstream import Outcome, Task, Trajectory
from slipstream.rewards import Evidence


def make_evidence(
    said: str = "",
    *,
    sampled: tuple[tuple[int, bool], ...] = (),
    outcome: Outcome = Outcome.FINISHED,
    messages: list[dict[str, Any]] | None = None,
    **task: Any,
) -> Evidence:
    """`sampled`: each token id, with whether the policy sampled it."""
    return Evidence(
        answer=said,
        task=Task(id="t", **{"prompt": "?", **task}),
        messages=messages or [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}],
        trajectory=Trajectory(
            lease=0,
            group=0,
            task="t",
            attempt=0,
            token_ids=array("i", [token for token, _ in sampled]),
            sampled=bytearray(is_sampled for _, is_sampled in sampled),
            logprobs=array("f", [0.0] * len(sampled)),
            version_runs=[],
            spans=[],
            outcome=outcome,
        ),
    )


@pytest.fixture
def evidence() -> Callable[..., Evidence]:
    return make_evidence
