"""Verifiers: code that scores a finished trajectory."""

from slipstream.rewards.answers import gsm8k, search_exact, search_f1
from slipstream.rewards.calls import function_calls
from slipstream.rewards.code import code
from slipstream.rewards.evidence import Evidence
from slipstream.rewards.exact import exact_match
from slipstream.rewards.mathematics import math
from slipstream.rewards.reward import Reward, RewardFailed, Score, reward, score
from slipstream.rewards.shaping import overlong, repetition, unfinished

__all__ = [
    "Evidence",
    "Reward",
    "RewardFailed",
    "Score",
    "code",
    "exact_match",
    "function_calls",
    "gsm8k",
    "math",
    "overlong",
    "repetition",
    "reward",
    "score",
    "search_exact",
    "search_f1",
    "unfinished",
]
