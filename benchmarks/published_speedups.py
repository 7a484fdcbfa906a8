"""What leaving a synchronous, colocated run gains: verl's published speed-ups from its synchronous step times.

Invariant: a prediction sees the synchronous column (seconds of a step and of its phases) and one tail parameter, the
sigma of a lognormal; the published asynchronous numbers are only compared with, and, for a fit, minimized over.

The rules, stated before anything is fitted:
- Synchronous generation starts a whole batch at once and lasts as long as its longest group: mean latency of a group
  = generation phase / E[largest of a batch].
- The asynchronous run has half the devices for generation: half a batch of slots, at the same pace per group (decoding
  is bound by memory, not by how many decode).
- The other half trains. Its work is that of both synchronous learner phases (old log-probabilities and update), and
  takes twice the time on half the devices. All phases of a synchronous step lose the same share to their longest
  sequences, and the asynchronous ones do not. Three quarters of the work are done as groups arrive (verl trains on a
  batch in four pieces).
- Depth is verl's staleness_threshold; nothing is discarded.

Step times and speed-ups: verl's docs/advance/fully_async.md (Qwen2.5-Math-7B on 32, 64 and 128 H20, 400 steps; ReTool,
multi-turn, Qwen2.5-7B on 32 H20, 200 steps). Usage: published_speedups.py [--json]
"""

import argparse
from collections.abc import Sequence

import msgspec
import numpy as np

from slipstream.simulator import read_scenario, simulate

BATCH = 128  # groups: a quarter of verl's, which changes nothing but the time that this takes
STREAMED = 0.75
SIGMAS = [round(0.240 + 0.002 * step, 3) for step in range(61)]


class Case(msgspec.Struct, frozen=True):
    name: str
    step_s: float  # synchronous, as are the next three
    generate_s: float
    old_logprob_s: float
    update_s: float
    staleness: float
    published: float  # speed-up


MATH = [
    Case("math, 32 GPUs", 790.10, 357.41, 107.71, 269.80, 0.5, 2.66),
    Case("math, 64 GPUs", 365.28, 150.72, 70.26, 133.41, 0.5, 1.92),
    Case("math, 128 GPUs", 356.30, 177.85, 53.92, 113.81, 0.5, 2.35),
]
MULTI_TURN = [Case("multi-turn, 32 GPUs", 375.47, 228.03, 35.19, 111.84, 1.0, 1.60)]


class Prediction(msgspec.Struct, frozen=True):
    case: str
    sigma: float
    published: float
    predicted: float
    error: float  # relative


class Outcome(msgspec.Struct, frozen=True):
    sigma_math: float
    sigma_multi_turn: float
    predictions: list[Prediction]
    worst_error: float
    multi_turn_with_the_sigma_of_math: float  # speed-up: what one sigma for all would say


def tail(sigma: float) -> float:
    """E[largest of a batch] / mean."""
    normal = np.random.default_rng(0).normal(size=(4000, BATCH)).max(axis=1)
    return float(np.exp(normal * sigma - sigma**2 / 2).mean())


def predict(case: Case, sigma: float, batches: int = 40) -> Prediction:
    largest = tail(sigma)
    learn_s = 2 * (case.old_logprob_s + case.update_s) / largest
    words = [
        f"batch={BATCH}",
        "group=1",
        f"depth={case.staleness}",
        "cutoff=1000000",
        f"concurrency={BATCH // 2}",
        f"latency=lognormal:{case.generate_s / largest},{sigma}",
        f"group_s={STREAMED * learn_s / BATCH}",
        f"step_s={(1 - STREAMED) * learn_s}",
        f"batches={batches}",
    ]
    speedup = case.step_s / simulate(read_scenario(words)).batch_s
    return Prediction(case.name, sigma, case.published, speedup, speedup / case.published - 1)


def fit(cases: Sequence[Case], batches: int = 40) -> float:
    """The sigma with the smallest largest error."""
    return min(SIGMAS, key=lambda sigma: max(abs(predict(case, sigma, batches).error) for case in cases))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the last line alone")
    as_json = parser.parse_args().json
    math, turns = fit(MATH), fit(MULTI_TURN)
    predictions = [predict(case, math) for case in MATH] + [predict(case, turns) for case in MULTI_TURN]
    outcome = Outcome(
        math,
        turns,
        predictions,
        max(abs(prediction.error) for prediction in predictions),
        predict(MULTI_TURN[0], math).predicted,
    )
    if not as_json:
        for each in predictions:
            print(f"{each.case:20} published {each.published:.2f}  predicted {each.predicted:.2f}  ({each.error:+.1%})")
    print(msgspec.json.encode(outcome).decode())


if __name__ == "__main__":
    main()
