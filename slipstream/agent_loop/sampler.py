"""What the agent loop asks of an engine: token ids in, token ids with log-probs and versions out.

Invariant: `len(token_ids) == len(logprobs) == sum(run.length for run in version_runs)`, also after an abort.
"""

from array import array
from enum import StrEnum
from typing import Protocol

import msgspec

from slipstream.trajectory import VersionRun


class Finish(StrEnum):
    STOP = "stop"  # a stop token was sampled; it is the last of token_ids
    LENGTH = "length"  # max_tokens reached
    ABORTED = "aborted"  # cut short from outside; what was sampled so far is here


class SampleRequest(msgspec.Struct, kw_only=True):
    prompt: "array[int]"  # array('i'): the whole stream so far
    max_tokens: int
    stop_token_ids: list[int]
    temperature: float
    seed: int
    seconds: float = 3600.0  # the engine ends the request after this, and hands over what was sampled


class Sample(msgspec.Struct, kw_only=True):
    token_ids: "array[int]"  # array('i')
    logprobs: "array[float]"  # array('f'), of the distribution sampled from
    version_runs: list[VersionRun]
    finish: Finish
    t_first_token: float  # Unix time
    seconds: float  # in the engine, waiting for a slot included


class EngineFailed(Exception):
    """The engine could not serve a request; the trajectory ends as `engine_failed`."""


class Sampler(Protocol):
    @property
    def max_model_len(self) -> int: ...

    async def sample(self, request: SampleRequest) -> Sample:
        """Raises EngineFailed. Cancelling the call aborts the request in the engine."""
        ...
