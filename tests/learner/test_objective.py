"""What the config adds to a step: reference, entropy, penalties, masks, rate; and rubbish that must not get through."""

import math
from pathlib import Path

import pytest
import torch
from learner_world import taken, trainer_of, trajectory
from test_step import Recorder, candidates, gradients, optimizer, settings

from slipstream.config import AdvantageSection, Config, LossSection, OutcomesSection, RolloutSection
from slipstream.configfile import read_config
from slipstream.errors import UserError
from slipstream.learner.advantages import group_advantages
from slipstream.learner.corrections import PRESETS
from slipstream.learner.groups import Candidate, judge
from slipstream.learner.losses import LOSSES, kl
from slipstream.learner.packing import segment_sum
from slipstream.learner.policy import Policy
from slipstream.learner.scores import advantages_of
from slipstream.learner.step import StepStats
from slipstream.learner.worker import Worker
from slipstream.staleness import Gate


@pytest.fixture
def policy(tiny_model: Path) -> Policy:
    policy = Policy(tiny_model, chunk_tokens=7)
    policy.model.double()
    return policy


def moved(policy: Policy) -> Policy:
    """Away from the start model."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return policy


def difference(policy: Policy, one: Config, other: Config) -> tuple[list[torch.Tensor], StepStats]:
    plain, with_it = gradients(policy, other)[0], gradients(policy, one)
    return [a - b for a, b in zip(with_it[0], plain, strict=True)], with_it[1][0]


def pull(policy: Policy, per_token, mode: str = "token_mean") -> list[torch.Tensor]:
    """The gradient of the mean of `per_token(logp, entropy)` over what the step trains on, without corrections."""
    batch = candidates()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for each in batch:
        data = each.packed
        found = policy.logprobs(data.token_ids, each.trainable, data.cu_seqlens, entropy_gradient=True)
        total = total + per_token(data, found)[each.trainable].sum()
        count += int(each.trainable.sum())
    return list(torch.autograd.grad(total / count, policy.parameters(), allow_unused=True))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_to_the_start_model_in_the_loss(policy: Policy, tiny_model: Path, estimator: str) -> None:
    moved(policy)
    start = Policy(tiny_model, chunk_tokens=64)
    plain = settings(tiny_model, presets=[])
    changed, stats = difference(
        policy, settings(tiny_model, presets=[], micro=26, loss={"kl_coef": 0.3, "kl_estimator": estimator}), plain
    )

    def drift(data, found):
        with torch.no_grad():
            then = start.logprobs(data.token_ids, data.sampled, data.cu_seqlens).logp.double()
        return kl(found.logp, then, estimator=estimator)

    for ours, theirs in zip(changed, pull(policy, drift), strict=True):
        torch.testing.assert_close(ours, 0.3 * theirs, rtol=1e-6, atol=1e-10)
    assert any(each.abs().max() > 1e-4 for each in changed)
    assert stats.kl != 0


def test_at_the_start_there_is_no_kl_and_without_a_coefficient_no_reference(policy: Policy, tiny_model: Path) -> None:
    changed, stats = difference(
        policy, settings(tiny_model, loss={"kl_coef": 1.0}), settings(tiny_model)
    )  # fmt: skip
    assert stats.kl == pytest.approx(0, abs=1e-9)  # the reference computes in float32
    assert all(each.abs().max() < 1e-5 for each in changed)
    assert Worker(settings(tiny_model), policy, optimizer(policy)).start is None


def test_kl_in_the_reward_is_that_of_the_policy_sampled_from(policy: Policy, tiny_model: Path) -> None:
    config = settings(tiny_model, loss={"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"})
    start = Policy(tiny_model, chunk_tokens=64)
    batch = candidates()
    references = [
        start.logprobs(each.packed.token_ids, each.packed.sampled, each.packed.cu_seqlens).logp.detach()
        for each in batch
    ]
    for each, reference, found in zip(batch, references, advantages_of(batch, references, config), strict=True):
        data = each.packed
        drift = torch.where(data.sampled, data.logprobs.double() - reference.double(), 0.0)
        scored = data.rewards.isfinite()
        rewards = (data.rewards - 0.1 * segment_sum(drift, data.cu_seqlens))[scored]
        torch.testing.assert_close(found[scored], group_advantages(rewards, data.groups[scored]))
        assert not found[~scored].any()
    changed, stats = difference(policy, config, settings(tiny_model))
    assert any(each.any() for each in changed)
    assert stats.kl == 0  # it is in the reward, and not in the loss too


def test_entropy_bonus(policy: Policy, tiny_model: Path) -> None:
    changed, _ = difference(
        policy,
        settings(tiny_model, presets=[], micro=26, loss={"entropy_coef": 0.2}),
        settings(tiny_model, presets=[]),
    )
    for ours, theirs in zip(changed, pull(policy, lambda data, found: found.entropy), strict=True):
        torch.testing.assert_close(ours, -0.2 * theirs, rtol=1e-6, atol=1e-10)


def test_overlong_members_lose_reward_before_the_baseline() -> None:
    group = [trajectory(place, 1, length=length, prompt=2, reward=reward) for place, length, reward in
             ((1, 12, 1.0), (2, 27, 1.0), (3, 34, 0.0))]  # fmt: skip
    candidate = judge(1, taken(group), OutcomesSection(), Gate(1, 1.0, 8), 0)
    assert isinstance(candidate, Candidate)
    config = Config(
        **{name: getattr(settings(Path("m")), name) for name in ("model", "environment", "tasks")},
        rollout=RolloutSection(max_tokens=32),
        advantage=AdvantageSection(estimator="dr_grpo", overlong_buffer=10, overlong_factor=0.5),
    )
    (found,) = advantages_of([candidate], [torch.zeros(0)], config)
    # 10, 25 and 32 sampled tokens: 0, 3/10 and all of the factor.
    rewards = torch.tensor([1.0, 1.0 - 0.15, -0.5]).double()
    torch.testing.assert_close(found, rewards - rewards.mean())


def test_a_limit_on_drift_drops_bad_trajectories_only(policy: Policy, tiny_model: Path) -> None:
    _, (without, _) = gradients(policy, settings(tiny_model, presets=[]))
    _, (stats, fates) = gradients(policy, settings(tiny_model, presets=[], opsm=1e-6))
    assert 0 < stats.trained < without.trained
    assert stats.masked_fraction > without.masked_fraction == 0
    advantages = {1: 1, 2: -1, 5: -1, 7: 1}  # by lease: the sign of those that train
    assert all(not fate.masked_mismatch or advantages[fate.lease] < 0 for fate in fates)


def test_the_rate_follows_the_effective_sample_size(policy: Policy, tiny_model: Path) -> None:
    adamw = optimizer(policy, lr=1e-3)
    made = trainer_of(settings(tiny_model, ess_lr=True), policy, adamw).step(candidates(), 3)
    assert made is not None
    assert made[0].ess < 0.99
    assert made[0].lr == pytest.approx(1e-3 * math.sqrt(made[0].ess))


@pytest.mark.parametrize("preset", [None, *PRESETS])
@pytest.mark.parametrize("name", LOSSES)
def test_rubbish_is_counted_and_never_nan(tiny_model: Path, name: str, preset: str | None) -> None:
    """Rollout log-probs of -91, rewards of 1e30, an empty trajectory, an infinite reward: a finite gradient."""
    policy = Policy(tiny_model, chunk_tokens=7)
    groups = [
        [
            trajectory(1, 1, reward=1e30, versions=3, logprob=-91.0),
            trajectory(2, 1, reward=-1e30, versions=3),
            trajectory(3, 1, length=0, prompt=0, reward=0.0, versions=[]),
            trajectory(4, 1, reward=float("inf"), versions=3),
        ],
        [trajectory(5, 2, reward=0.0, versions=2), trajectory(6, 2, reward=1.0, versions=2, logprob=-0.001)],
    ]
    for proximal in ("recompute", "bypass"):
        recorder = optimizer(policy, Recorder)
        config = settings(
            tiny_model, name=name, proximal=proximal, presets=[preset] if preset else [], loss={"entropy_coef": 0.1}
        )
        made = trainer_of(config, policy, recorder).step(candidates(groups=groups), 3)
        assert made is not None
        stats, fates = made
        assert all(gradient.isfinite().all() for gradient in recorder.gradients)
        assert all(math.isfinite(getattr(stats, field)) for field in stats.__struct_fields__)
        assert stats.trained == sum(fate.trained for fate in fates)
        counted = sum(fate.trained + fate.masked_mismatch + fate.masked_stale + fate.failed for fate in fates)
        assert counted == 5 * 8
        assert {fate.lease: fate.failed for fate in fates}[4] == 8  # an infinite reward is no score


def test_a_batch_whose_every_token_is_masked_changes_nothing(tiny_model: Path) -> None:
    policy = Policy(tiny_model, chunk_tokens=7)
    groups = [[trajectory(1, 1, reward=1.0, versions=3, logprob=-91.0), trajectory(2, 1, versions=3, logprob=-91.0)]]
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    made = trainer_of(settings(tiny_model), policy, optimizer(policy)).step(candidates(groups=groups), 3)
    assert made is not None
    stats, fates = made
    assert (stats.trained, stats.grad_norm, stats.masked_fraction) == (0, 0, 1)
    assert sum(fate.masked_mismatch for fate in fates) == 16
    assert all(now.equal(then) for now, then in zip(policy.parameters(), before, strict=True))


def test_every_parameter_of_the_config_reaches_its_loss(policy: Policy, tiny_model: Path) -> None:
    for name, changed in (
        ("ppo", {"dual_clip": 1.01}),
        ("ppo", {"clip_low": 0.9}),
        ("dppo_tv", {"tv_limit": 1e-4}),
        ("dppo_tv", {"tv_penalty": 0.5}),
        ("gspo", {"clip_low": 0.9}),
    ):
        plain = {"name": name, "proximal": "bypass", "presets": []}
        found, _ = difference(policy, settings(tiny_model, **plain, loss=changed), settings(tiny_model, **plain))
        assert any(each.abs().max() > 1e-9 for each in found), changed
    assert LossSection().kl_coef == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["learner.ess_lr=true", 'correction.presets=["icepop"]'], "learner.ess_lr = true: there are no weights"),
        (["learner.ess_lr=true", "learner.proximal=bypass"], "learner.ess_lr = true: there are no weights"),
        (["learner.proximal=interpolate", "loss.name=reinforce"], "'reinforce' has no ratio"),
        (["advantage.overlong_buffer=2000"], "write at most rollout.max_tokens = 1024"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[model]\npath = "m"\n[environment]\npath = "e.py:e"\n[tasks]\ntrain = "t.jsonl"\n')
    with pytest.raises(UserError, match=message):
        read_config(file, overrides, files=False)
