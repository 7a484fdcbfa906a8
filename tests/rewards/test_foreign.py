"""Reward functions written for verl and TRL, as they are."""

import pytest

from slipstream import reward
from slipstream.rewards import RewardFailed, score
from slipstream.usercall import UserCalls

ROW = {
    "data_source": "openai/gsm8k",
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"index": 7, "split": "train"},
}


async def scored(function, shown):
    return await score([reward(function)], shown, 5, UserCalls())


async def test_verl_compute_score(evidence):
    seen = {}

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        seen.update(locals())
        return 1.0 if ground_truth in solution_str else 0.0

    assert (await scored(compute_score, evidence("it is 42", extra=ROW))).parts == {"compute_score": 1.0}
    assert seen["data_source"] == "openai/gsm8k"
    assert (seen["ground_truth"], seen["extra_info"]) == ("42", {"index": 7, "split": "train"})


async def test_verl_kinds_of_signature_and_result(evidence):
    def compute_score(solution_str, ground_truth, **kwargs):
        return {"score": 0.5, "acc": True, "pred": "text", "bad": float("nan"), "data_source": kwargs["data_source"]}

    async def compute_score_async(data_source, solution_str, ground_truth, extra_info):
        return True

    total = await scored(compute_score, evidence(extra=ROW))
    assert (total.total, total.parts) == (0.5, {"compute_score": 0.5, "compute_score.acc": 1.0})
    assert (await scored(compute_score_async, evidence(extra=ROW))).total == 1.0


async def test_verl_without_its_row_gets_the_answer(evidence):
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return (data_source, ground_truth, extra_info) == ("", "42", {})

    assert (await scored(compute_score, evidence(answer="x"))).total == 0.0
    assert (await scored(compute_score, evidence(answer="42"))).total == 1.0


async def test_trl_with_texts(evidence):
    def reward_length(completions, **kwargs):
        assert kwargs["prompts"] == ["?"]
        assert kwargs["level"] == [3]
        assert kwargs["completion_ids"] == [[5, 6, 7]]
        return [float(len(completion)) for completion in completions]

    shown = evidence("four", extra={"level": 3}, sampled=((1, False), (5, True), (6, False), (7, True)))
    assert (await scored(reward_length, shown)).parts == {"reward_length": 4.0}


async def test_trl_with_messages_and_columns(evidence):
    def reward_format(prompts, completions, answer):
        assert prompts == [[{"role": "user", "content": "?"}]]
        return [float(completion[0]["content"] == right) for completion, right in zip(completions, answer, strict=True)]

    user = {"role": "user", "content": "?"}
    for system in ([], [{"role": "system", "content": "Be brief."}]):
        messages = [*system, user, {"role": "assistant", "content": "42"}]
        shown = evidence(prompt=[user], messages=messages, answer="42")
        assert (await scored(reward_format, shown)).total == 1.0


async def test_trl_none_is_no_score_and_nonsense_fails(evidence):
    assert (await scored(lambda completions: [None], evidence())).total is None

    def judge(completions):
        return 1.0

    with pytest.raises(RewardFailed, match="a list of one score was expected"):
        await scored(judge, evidence())

    def wants_column(completions, level):
        return [1.0]

    with pytest.raises(RewardFailed, match="level"):
        await scored(wants_column, evidence())


async def test_each_source_has_its_own_rewards(evidence):
    def one():
        return 1.0

    def other():
        return 10.0

    rewards = [reward(one).only_for("a", "b").weighted(0.5), reward(other).only_for("c")]
    for source, total in (("a", 0.5), ("b", 0.5), ("c", 10.0), ("d", None)):
        shown = evidence(extra={"data_source": source})
        assert (await score(rewards, shown, 5, UserCalls())).total == total
