"""The trajectories that every transport of this benchmark carries: seeded, of 2k to 32k tokens, with all columns.

Invariant: the same `count` gives the same trajectories, whoever asks; what a system would have at hand before it sends
(flat buffers, or Python lists) is made before its clock starts.
"""

import math
import random
import time
from array import array
from collections.abc import Sequence

import msgspec
import numpy as np

from slipstream.trajectory import Outcome, Span, SpanKind, Trajectory, VersionRun

GROUP = 4
SHORTEST, LONGEST = 2_048, 32_768
PROMPT = 1_024
CHARACTERS = 3  # of the messages' text, a token


class Cost(msgspec.Struct):
    """What one process spent on the part that is measured."""

    tokens: int
    cpu_s: float
    wall_s: float


class Meter:
    """CPU and wall-clock seconds of this process since it was made."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def cost(self, tokens: int) -> Cost:
        return Cost(tokens, time.process_time() - self._cpu, time.perf_counter() - self._wall)


def lengths(count: int, shortest: int = SHORTEST, longest: int = LONGEST) -> list[int]:
    """Log-uniform: most are short, most tokens are in the long ones."""
    chance = random.Random(0)
    low, high = math.log(shortest), math.log(longest)
    return [int(math.exp(chance.uniform(low, high))) for _ in range(count)]


def trajectories(of_lengths: Sequence[int]) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    return [_trajectory(rng, number, length) for number, length in enumerate(of_lengths)]


def _trajectory(rng: np.random.Generator, number: int, length: int) -> Trajectory:
    """A prompt, then turns: two thirds sampled, one third tool result; new weights every few turns."""
    prompt = min(PROMPT, length // 2)
    sampled = np.zeros(length, np.uint8)
    spans = [Span(SpanKind.PROMPT, 0, 0, prompt)]
    runs = [VersionRun(prompt, -1)]
    turn, at = 0, prompt
    while at < length:
        kind = SpanKind.TOOL if turn % 2 else SpanKind.SAMPLED
        size = min(length - at, 256 if turn % 2 else 512)
        spans.append(Span(kind, turn // 2, at, size))
        runs.append(VersionRun(size, -1 if turn % 2 else turn // 6))
        sampled[at : at + size] = kind == SpanKind.SAMPLED
        turn, at = turn + 1, at + size
    logprobs = np.where(sampled, -rng.exponential(0.4, length), 0.0).astype(np.float32)
    return Trajectory(
        lease=number,
        group=number // GROUP,
        task="task",
        attempt=0,
        token_ids=array("i", rng.integers(0, 150_000, length, np.int32).tobytes()),
        sampled=bytearray(sampled.tobytes()),
        logprobs=array("f", logprobs.tobytes()),
        version_runs=runs,
        spans=spans,
        outcome=Outcome.FINISHED,
        reward=float(number % 2),
        reward_parts={"exact": float(number % 2), "format": 1.0},
        turns=turn // 2 + 1,
        tool_calls=turn // 2,
        t_leased=1.0,
        t_first_token=2.0,
        t_done=3.0,
        detail=text(rng, CHARACTERS * length),
    )


def text(rng: np.random.Generator, size: int) -> bytes:
    """As long as the messages would be, and as hard to compress as their letters."""
    return rng.integers(97, 123, size, np.uint8).tobytes()


class Lists(msgspec.Struct):
    """The same with a Python object for every token, as engines and their servers hand them out."""

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]  # of the response: 1 where sampled
    logprobs: list[float]  # of the response
    reward: float
    detail: bytes


def lists(trajectory: Trajectory) -> Lists:
    prompt = trajectory.spans[0].length
    ids = trajectory.token_ids.tolist()
    return Lists(
        prompt_ids=ids[:prompt],
        response_ids=ids[prompt:],
        mask=list(trajectory.sampled[prompt:]),
        logprobs=trajectory.logprobs.tolist()[prompt:],
        reward=trajectory.reward or 0.0,
        detail=trajectory.detail or b"",
    )
