import asyncio
import functools
import threading
from array import array

import pytest

from slipstream import Outcome, Task, Trajectory, reward
from slipstream.errors import UserError
from slipstream.rewards import Evidence, RewardFailed, exact_match, score
from slipstream.usercall import UserCalls

EVIDENCE = Evidence(
    answer=" Forty\n two",
    task=Task(id="t", prompt="?", answer="forty two"),
    messages=[{"role": "user", "content": "?"}],
    trajectory=Trajectory(
        lease=0,
        group=0,
        task="t",
        attempt=0,
        token_ids=array("i"),
        sampled=bytearray(),
        logprobs=array("f"),
        version_runs=[],
        spans=[],
        outcome=Outcome.FINISHED,
        turns=2,
    ),
)


def scored(*rewards, seconds=5.0):
    return asyncio.run(score(rewards, EVIDENCE, seconds, UserCalls()))


def gives(value, name="judge", weight=1.0):
    def judge() -> object:
        return value

    judge.__name__ = name
    return reward(weight=weight)(judge)


@pytest.mark.parametrize(
    ("said", "wanted", "is_right"), [(" 42\n", "42", 1), ("ok  Then", "OK then", 1), ("42.", "42", 0)]
)
def test_exact_match(said, wanted, is_right):
    assert exact_match(said, Task(id="t", prompt="?", answer=wanted)) == bool(is_right)


def test_rewards_get_what_they_name():
    @reward
    def judge(messages, task, tolerance: float = 0.5):
        assert messages == EVIDENCE.messages
        return task.id == "t" and tolerance == 0.5

    @reward
    async def turns(trajectory):
        await asyncio.sleep(0)
        return trajectory.turns

    assert scored(exact_match, judge, turns).parts == {"exact_match": 1.0, "judge": 1.0, "turns": 2.0}


def test_weights_and_no_score():
    assert scored(gives(1, "a", 0.5), gives(True, "b", -2.0), gives(None, "c")).total == -1.5
    assert scored(gives(1, "a"), gives(None, "c")).parts == {"a": 1.0}
    assert scored(gives(None)).total is None
    assert scored(gives(0)).total == 0.0


def test_numbers_of_other_kinds():
    numpy = pytest.importorskip("numpy")
    assert scored(gives(numpy.float32(0.5))).total == 0.5


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), "1", [1], object()])
def test_what_is_no_finite_number_fails_by_name(value):
    with pytest.raises(RewardFailed, match="reward judge"):
        scored(gives(1, "good"), gives(value))


def test_raising_fails_with_the_traceback():
    @reward
    def judge(answer):
        raise ValueError(f"cannot read {answer.strip()[:5]}")

    with pytest.raises(RewardFailed, match=r"(?s)judge raised.*Traceback.*ValueError: cannot read Forty"):
        scored(judge)


@pytest.mark.parametrize("raised", [SystemExit(1), TimeoutError("slow")])
def test_exits_and_timeouts_of_its_own_are_raised_too(raised):
    @reward
    def judge():
        raise raised

    with pytest.raises(RewardFailed, match="judge raised"):
        scored(judge)


def test_hanging_fails_in_time_and_all_rewards_share_it():
    release = threading.Event()

    @reward
    def judge():
        release.wait()

    @reward
    async def judge_async():
        await asyncio.Event().wait()

    for each in (judge, judge_async):
        with pytest.raises(RewardFailed, match=f"{each.name} did not end in time"):
            scored(each, seconds=0.1)
    release.set()


def test_sync_rewards_run_off_the_loop():
    assert scored(reward(lambda: threading.current_thread() is threading.main_thread())).total == 0.0


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda reply: 1.0, r"asks for reply; it may ask for answer, task, messages, trajectory"),
        (lambda *answers: 1.0, "answers"),
        (functools.partial(max, 1), "wrap it in a def"),
    ],
)
def test_refused(function, says):
    with pytest.raises(UserError, match=says):
        reward(function)


def test_a_weight_that_is_no_number_is_refused():
    with pytest.raises(UserError, match="weight = nan"):
        gives(1, weight=float("nan"))
