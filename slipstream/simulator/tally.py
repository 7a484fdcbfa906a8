"""What a simulated run came to: how busy everybody was, how old the tokens were, what became of them.

Invariant: everything is counted over the same window, which begins when the first tenth of the batches is made.
"""

from collections import Counter

import msgspec
import numpy as np

from slipstream.queue.messages import Accounts


class Result(msgspec.Struct, kw_only=True, frozen=True):
    """Shares are 0..1, staleness is in versions, times are virtual seconds."""

    batches: int
    virtual_s: float
    batch_s: float  # seconds from one version to the next, mean
    learner_busy: float
    learner_waiting: float
    rollouter_busy: float  # share of all slots that hold a trajectory
    rollouter_tools: float  # share of all slots whose trajectory is with a tool
    rollouter_paused: float  # share of time that engines stand still for weights
    generated_tok_s: float
    trained_tok_s: float
    staleness_mean: float  # of trained trajectories: the age of their oldest trained token
    staleness_p99: float
    staleness_max: int
    depth: float  # of the gate, at the end
    over_depth_fraction: float  # trained trajectories that are older than depth
    token_staleness_mean: float  # of trained tokens
    token_staleness_p99: float
    token_staleness_max: int
    discarded_fraction: float  # trajectories of which no token was young enough
    stale_token_fraction: float  # tokens that were too old, of the delivered ones
    length_bias: float  # trained tokens of a trajectory over its sampled ones, mean by mean; 1: no bias
    length_generated: list[float]  # p10, p50, p90, p99
    length_trained: list[float]
    staleness_tokens: dict[int, int]  # trained tokens by age: the histogram
    accounts: Accounts  # of the ledger, in tokens, since the start
    accounts_hold: bool
    wall_s: float  # what the simulation itself took
    trajectories: int  # delivered since the start


class Tally:
    """Counts while `counting`."""

    def __init__(self) -> None:
        self.counting = False
        self.began = 0.0
        self.steps = 0
        self.busy_s = self.waiting_s = 0.0
        self.slot_s = self.tool_s = 0.0
        self.paused_s = 0.0
        self.generated = 0
        self._ages: Counter[int] = Counter()  # trained tokens by age
        self._oldest: Counter[int] = Counter()  # trained trajectories by the age of their oldest trained token
        self._settled = self._discarded = self._settled_tokens = self._stale_tokens = 0
        self._lengths: list[int] = []
        self._trained: list[int] = []

    def settled(self, tokens: int, trained: int, ages: list[tuple[int, int]]) -> None:
        """A trajectory that was to be trained on. `ages`: (age, tokens) of what was."""
        if not self.counting:
            return
        self._settled += 1
        self._settled_tokens += tokens
        self._stale_tokens += tokens - trained
        self._lengths.append(tokens)
        if not trained:
            self._discarded += 1
            return
        self._trained.append(trained)
        for age, count in ages:
            self._ages[age] += count
        self._oldest[max(age for age, _ in ages)] += 1

    def result(
        self,
        *,
        now: float,
        depth: float,
        slots: int,
        engines: int,
        accounts: Accounts,
        holds: bool,
        wall_s: float,
        delivered: int,
    ) -> Result:
        seconds = max(now - self.began, 1e-12)
        trained = sum(self._ages.values())
        oldest, ages = _Counted(self._oldest), _Counted(self._ages)
        mean_length = self._settled_tokens / max(1, self._settled)
        return Result(
            batches=self.steps,
            virtual_s=seconds,
            batch_s=seconds / max(1, self.steps),
            learner_busy=self.busy_s / seconds,
            learner_waiting=self.waiting_s / seconds,
            rollouter_busy=self.slot_s / (slots * seconds),
            rollouter_tools=self.tool_s / (slots * seconds),
            rollouter_paused=self.paused_s / (engines * seconds),
            generated_tok_s=self.generated / seconds,
            trained_tok_s=trained / seconds,
            staleness_mean=oldest.mean(),
            staleness_p99=oldest.quantile(0.99),
            staleness_max=oldest.most(),
            depth=depth,
            over_depth_fraction=oldest.over(depth),
            token_staleness_mean=ages.mean(),
            token_staleness_p99=ages.quantile(0.99),
            token_staleness_max=ages.most(),
            discarded_fraction=self._discarded / max(1, self._settled),
            stale_token_fraction=self._stale_tokens / max(1, self._settled_tokens),
            length_bias=trained / max(1, len(self._trained)) / mean_length if self._trained else 0.0,
            length_generated=_quantiles(self._lengths),
            length_trained=_quantiles(self._trained),
            staleness_tokens=dict(sorted(self._ages.items())),
            accounts=accounts,
            accounts_hold=holds,
            wall_s=wall_s,
            trajectories=delivered,
        )


class _Counted:
    """Statistics of whole numbers that were counted."""

    def __init__(self, counts: "Counter[int]") -> None:
        self._counts, self._total = counts, sum(counts.values())

    def mean(self) -> float:
        return sum(value * count for value, count in self._counts.items()) / max(1, self._total)

    def most(self) -> int:
        return max(self._counts, default=0)

    def over(self, bound: float) -> float:
        return sum(count for value, count in self._counts.items() if value > bound) / max(1, self._total)

    def quantile(self, share: float) -> float:
        seen = 0
        for value, count in sorted(self._counts.items()):
            seen += count
            if seen >= share * self._total:
                return float(value)
        return 0.0


def _quantiles(lengths: list[int]) -> list[float]:
    return np.quantile(lengths, [0.1, 0.5, 0.9, 0.99]).tolist() if lengths else []
