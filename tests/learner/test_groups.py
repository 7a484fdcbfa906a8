"""What may be trained on, and where every token of a taken group ends: for any outcomes, scores and ages."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_world import taken, trajectory

from slipstream.config import OutcomesSection
from slipstream.learner.groups import Candidate, Dropped, fates_of, judge
from slipstream.queue.messages import Fate
from slipstream.staleness import Gate
from slipstream.trajectory import Outcome, Trajectory

OUTCOMES = OutcomesSection()
COUNTS = ("trained", "masked_stale", "masked_mismatch", "zero_signal", "discarded_stale", "failed")


def total(fate: Fate) -> int:
    return sum(getattr(fate, name) for name in COUNTS)


def verdict(*members: Trajectory, version: int = 0, cutoff: int = 2) -> Candidate | Dropped:
    return judge(7, taken(members), OUTCOMES, Gate(batch=1, depth=1.0, cutoff=cutoff), version)


@st.composite
def groups(draw: st.DrawFn) -> list[Trajectory]:
    members = []
    for lease in range(draw(st.integers(1, 4))):
        prompt = draw(st.integers(0, 3))
        versions = draw(st.lists(st.integers(0, 9), max_size=6))
        members.append(
            trajectory(
                lease,
                7,
                length=prompt + len(versions),
                prompt=prompt,
                versions=versions,
                outcome=draw(st.sampled_from(list(Outcome))),
                reward=draw(st.sampled_from([None, 0.0, 1.0, float("nan"), float("inf")])),
            )
        )
    return members


@given(groups(), st.integers(0, 12), st.integers(0, 4), st.randoms(use_true_random=False))
def test_every_token_ends_in_one_count_and_none_over_the_cutoff_is_trained(
    members: list[Trajectory], version: int, cutoff: int, random
) -> None:
    gate = Gate(batch=1, depth=1.0, cutoff=cutoff)
    found = judge(7, taken(members), OUTCOMES, gate, version)
    if isinstance(found, Dropped):
        fates = found.fates
        assert not any(fate.trained or fate.masked_mismatch for fate in fates)
    else:
        data = found.packed
        for place in torch.nonzero(found.trainable)[:, 0].tolist():
            assert data.sampled[place]
            assert gate.fresh(int(data.versions[place]), version)
            owner = int((data.cu_seqlens[1:] <= place).sum())
            assert getattr(OUTCOMES, members[owner].outcome) == "train"
            assert members[owner].reward in (0.0, 1.0)
        keep = torch.tensor([random.random() < 0.7 for _ in range(len(data.token_ids))], dtype=torch.bool)
        fates = fates_of(found, keep)
        assert sum(fate.trained for fate in fates) == int((found.trainable & keep).sum())
    assert [fate.lease for fate in fates] == [member.lease for member in members]
    assert [total(fate) for fate in fates] == [sum(member.sampled) for member in members]
    assert all(
        getattr(OUTCOMES, member.outcome) == "train" or total(fate) == fate.failed
        for member, fate in zip(members, fates, strict=True)
    )


def test_equal_rewards_are_no_signal() -> None:
    found = verdict(trajectory(1, 7, reward=1.0), trajectory(2, 7, reward=1.0))
    assert isinstance(found, Dropped)
    assert found.reason == "zero_signal"
    assert [fate.zero_signal for fate in found.fates] == [8, 8]
    assert found.seen.pass_rate() == 1.0


def test_one_score_is_no_baseline() -> None:
    found = verdict(trajectory(1, 7, reward=1.0), trajectory(2, 7, reward=None, outcome=Outcome.REWARD_FAILED))
    assert isinstance(found, Dropped)
    assert [(fate.zero_signal, fate.failed) for fate in found.fates] == [(8, 0), (0, 8)]


def test_a_member_without_a_score_is_neither_trained_on_nor_a_zero() -> None:
    """Whatever its outcome says: null, NaN and infinity are no scores."""
    for reward in (None, float("nan"), float("inf"), float("-inf")):
        found = verdict(trajectory(1, 7, reward=1.0), trajectory(2, 7, reward=0.0), trajectory(3, 7, reward=reward))
        assert isinstance(found, Candidate)
        assert found.trains.tolist() == [True, True, False]
        assert found.seen.rewards == [1.0, 0.0]
        assert fates_of(found, torch.ones(36, dtype=torch.bool))[2] == Fate(lease=3, outcome="finished", failed=8)


def test_a_masked_member_counts_in_the_baseline_when_it_was_scored() -> None:
    found = verdict(trajectory(1, 7, reward=1.0), trajectory(2, 7, reward=0.0, outcome=Outcome.TIMEOUT))
    assert isinstance(found, Candidate)
    assert found.trains.tolist() == [True, False]
    assert fates_of(found, torch.ones(24, dtype=torch.bool)) == [
        Fate(lease=1, outcome="finished", trained=8),
        Fate(lease=2, outcome="timeout", failed=8),
    ]


def test_the_cutoff_masks_tokens_and_not_trajectories() -> None:
    ages = [0, 0, 0, 1, 1, 2, 2, 3]
    found = verdict(
        trajectory(1, 7, reward=1.0, versions=ages), trajectory(2, 7, versions=0), version=3, cutoff=2
    )  # fmt: skip
    assert isinstance(found, Candidate)
    fates = fates_of(found, torch.ones(24, dtype=torch.bool))
    assert [(fate.trained, fate.masked_stale) for fate in fates] == [(5, 3), (0, 8)]


def test_a_group_with_no_fresh_token_is_discarded() -> None:
    found = verdict(trajectory(1, 7, reward=1.0), trajectory(2, 7, outcome=Outcome.TIMEOUT), version=3, cutoff=2)
    assert isinstance(found, Dropped)
    assert found.reason == "discarded_stale"
    assert [(fate.discarded_stale, fate.failed) for fate in found.fates] == [(8, 0), (0, 8)]
