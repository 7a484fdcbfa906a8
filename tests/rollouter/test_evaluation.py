"""What `slipstream eval` makes of attempts, and what it and `doctor` refuse."""

from array import array
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import Outcome, Trajectory
from slipstream.cli import main
from slipstream.rollouter.evaluation import evaluation, pass_at_k, powers_of_two


def attempt(reward: float | None, outcome: Outcome = Outcome.FINISHED) -> Trajectory:
    return Trajectory(
        lease=0,
        group=0,
        task="t",
        attempt=0,
        token_ids=array("i", [1, 2, 3]),
        sampled=bytearray([0, 1, 1]),
        logprobs=array("f", [0, -1, -1]),
        version_runs=[],
        spans=[],
        outcome=outcome,
        reward=reward,
        turns=2,
        tool_calls=3,
        tool_errors=1,
    )


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_all_choices_of_k_attempts(numbers: tuple[int, int, int]) -> None:
    samples, passed, k = numbers
    choices = list(combinations([True] * passed + [False] * (samples - passed), k))
    assert pass_at_k(samples, passed, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_powers_of_two_end_with_the_number_itself() -> None:
    assert [powers_of_two(most) for most in (1, 2, 3, 8, 9)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 9]]


def test_attempts_without_a_reward_are_not_passed_and_are_named() -> None:
    failed = attempt(None, Outcome.ENGINE_FAILED)
    result = evaluation("m", [attempt(1.0), attempt(0.5), failed, failed], 2, 1.0)
    assert (result.tasks, result.samples, result.mean_at_k) == (2, 2, 0.25)
    assert result.pass_at == {1: 0.25, 2: 0.5}
    assert result.mean_reward == 0.75  # of those that have one
    assert result.outcomes == {"finished": 2, "engine_failed": 2}
    assert (result.tokens, result.tool_calls, result.tool_errors, result.turns_mean) == (8, 12, 4, 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval", "config.toml"], "tasks.heldout = '': there is nothing to evaluate on"),
        (
            ["eval", "config.toml", "--samples", "0"],
            "argument --samples: '0' is no number of attempts; write 1 or more",
        ),
        (["eval", "config.toml", "--version", "3"], "--version 3: config.toml is no run"),
        (["eval", "."], "RUN = '.': it has no config.toml"),
        (["eval", "missing.toml"], "config 'missing.toml' cannot be read"),
        (["doctor", "config.toml", "model.path=nowhere"], "model.path"),
    ],
)
def test_what_cannot_be_tried_is_refused(
    words: list[str], said: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if words[1] == ".":
        config.unlink()
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
