"""Verifiers: code that scores a finished trajectory."""

from slipstream.rewards.exact import exact_match
from slipstream.rewards.reward import Evidence, Reward, RewardFailed, Score, reward, score

__all__ = ["Evidence", "Reward", "RewardFailed", "Score", "exact_match", "reward", "score"]
