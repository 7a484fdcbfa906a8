"""From rewards to the advantages of a group's members, with what the config adds to or takes off a reward.

Invariant: every scored member counts in its group's baseline, whether it is trained on or not; who was not scored has
advantage 0. Nothing here changes whether a group has signal: that is decided by the rewards as they came.
"""

import torch
from torch import Tensor

from slipstream.config import Config
from slipstream.learner.advantages import group_advantages, overlong_penalty
from slipstream.learner.groups import Candidate, is_scored
from slipstream.learner.losses import kl
from slipstream.learner.packing import only, segment_sum


def advantages_of(candidates: list[Candidate], references: list[Tensor], config: Config) -> list[Tensor]:
    """float64 [N] for each group; `references` are the start model's log-probs [T], empty for no KL."""
    rewards = [_reward(*pair, config) for pair in zip(candidates, references, strict=True)]
    scored = torch.cat([is_scored(each.packed) for each in candidates])
    lengths = torch.cat([_lengths(each) for each in candidates])
    joined, groups = torch.cat(rewards), torch.cat([each.packed.groups for each in candidates])
    found = torch.zeros_like(joined)
    found[scored] = group_advantages(
        joined[scored],
        groups[scored],
        estimator=config.advantage.estimator,
        lengths=lengths[scored],
        population=config.advantage.population,
    )
    return list(found.split([len(each) for each in rewards]))


def _reward(candidate: Candidate, reference: Tensor, config: Config) -> Tensor:
    """The reward less the overlong penalty, and less the KL of the policy sampled from to the start model."""
    data, reward = candidate.packed, candidate.packed.rewards
    if config.advantage.overlong_buffer:
        reward = reward + overlong_penalty(
            _lengths(candidate).double(),
            max_length=config.rollout.max_tokens,
            buffer=config.advantage.overlong_buffer,
            factor=config.advantage.overlong_factor,
        )
    if len(reference):
        rollout = only(data.sampled, data.logprobs.double())
        drift = kl(rollout, only(data.sampled, reference.double()), estimator=config.loss.kl_estimator)
        reward = reward - config.loss.kl_coef * segment_sum(only(data.sampled, drift), data.cu_seqlens)
    return reward


def _lengths(candidate: Candidate) -> Tensor:
    return segment_sum(candidate.packed.sampled.long(), candidate.packed.cu_seqlens)
