"""One optimizer step over a batch of groups, in packed micro-batches that run while the rest of the batch is awaited.

Invariant: gradients accumulate unnormalized by micro-batch and are divided once, by the batch's own denominator: any
split of the batch into micro-batches, and any way of handing it over, gives the same step. No token over the cutoff, of
a masked trajectory, or cut by a mask enters the loss.

The denominator counts what can be trained on: tokens that are sampled, of a trajectory that trains, and fresh; or
trajectories with such a token. Tokens that a mismatch rule cuts stay in it ("sampled", not "kept"), since they are
known only once log-probs are; cutting then never makes the others' steps larger.

A batch gets exactly one step, so the policy before the step is the current one: its log-probs are those of the same
forward pass, detached. Two things need the whole batch before any of it can run backward: advantages that are whitened
over the batch, and `correction.m2po`, which is given the log-probs of all of it by a forward pass of its own.
"""

import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from slipstream.config import Config
from slipstream.learner.groups import Candidate, fates_of
from slipstream.learner.micro import Micro, Stream, joined, micro_of, present
from slipstream.learner.objective import Objective
from slipstream.learner.scores import advantages_of
from slipstream.learner.tokens import step_tokens
from slipstream.learner.worker import Computes, Done, Text
from slipstream.observe.steps import StepTokens
from slipstream.queue.messages import Fate

NEVER: Callable[[], bool] = lambda: False  # noqa: E731


class StepStats(msgspec.Struct):
    """What one step did. Fractions and means are over the tokens that could be trained on, staleness over those that
    were."""

    loss: float  # the policy's part
    kl: float
    entropy: float
    grad_norm: float
    skipped: bool
    lr: float
    clip_fraction: float
    ess: float
    weight_mean: float
    clipped_fraction: float
    masked_fraction: float
    kl_k1: float
    kl_k3: float
    max_prob_diff: float
    staleness_mean: float
    staleness_p99: float
    staleness_max: int
    tokens: int  # packed
    trained: int  # tokens in the loss
    micro_batches: int
    seconds: float  # of forward and backward passes and the step
    hidden: float  # share of these seconds that was over before the batch was complete


class _Ran(NamedTuple):
    """A micro-batch, without the reference, and what came of it."""

    micro: Micro
    done: Done


class Trainer:
    """`begin`, `add` groups as they come, `finish` makes version v+1 from version v and these."""

    def __init__(self, config: Config, computes: Computes, ranks: int = 1) -> None:
        """`computes`: one worker, or that many ranks as one."""
        self._config, self._computes = config, computes
        self._objective = Objective(config)
        self._whole = self._objective.across_batch or config.advantage.estimator == "reinforce_pp_baseline"
        self._budget = config.learner.micro_tokens * ranks
        self.begin(0)

    def step(
        self, candidates: list[Candidate], version: int, stopping: Callable[[], bool] = NEVER
    ) -> tuple[StepStats, list[Fate]] | None:
        """A whole batch at once; None when `stopping` says so."""
        self.begin(version)
        for candidate in candidates:
            self.add(candidate, stopping)
        self._early = 0.0  # nothing was waited for
        return self.finish(stopping)

    def begin(self, version: int) -> None:
        """Of a batch, for the step after `version`. What was added since the last step is forgotten."""
        self._version = version
        self._candidates: list[Candidate] = []
        self._references: list[Tensor] = []
        self._stream = Stream(self._budget)
        self._ran: list[_Ran] = []
        self._weights = torch.zeros(0)
        self._early = self._seconds = 0.0
        self._stopped = False
        self._computes.clear()

    def add(self, candidate: Candidate, stopping: Callable[[], bool] = NEVER) -> None:
        """One more group, in the order of the batch; runs the micro-batches that are full with it."""
        began = time.monotonic()
        self._candidates.append(candidate)
        self._references.append(self._reference_of(candidate))
        if not self._whole:
            self._run(self._stream.add(self._micros([candidate], self._references[-1:])[0]), stopping)
        # What the last group brings is not hidden behind the wait for it.
        self._early = self._seconds
        self._seconds += time.monotonic() - began

    def finish(self, stopping: Callable[[], bool] = NEVER) -> tuple[StepStats, list[Fate]] | None:
        """None when `stopping` said so between two micro-batches: no parameter has changed then.

        A gradient that is not finite leaves the parameters as they are; the batch is consumed all the same, and its
        fates are those of a step.
        """
        began = time.monotonic()
        across: Iterable[Tensor] | None = None
        if self._whole:
            micros = [
                full for each in self._micros(self._candidates, self._references) for full in self._stream.add(each)
            ]
            micros += self._stream.rest()
            across = self._across(micros) if self._objective.across_batch else None
        else:
            micros = self._stream.rest()
        self._run(micros, stopping, across)
        if self._stopped:
            return None
        return self._stepped(began)

    def tokens(self) -> StepTokens:
        """What the step that `finish` made of each sampled token, until the next begins."""
        whole, logp, keep = self._joined()
        return step_tokens(
            leases=torch.cat([candidate.packed.leases[present(candidate)[0]] for candidate in self._candidates]),
            sampled=torch.cat([candidate.packed.sampled[present(candidate)[1]] for candidate in self._candidates]),
            whole=whole,
            logp=logp,
            weights=self._weights,
            keep=keep,
        )

    def _joined(self) -> tuple[Micro, Tensor, Tensor]:
        """All that ran, its log-probs and what was kept of it."""
        dones = [ran.done for ran in self._ran]
        whole = joined([ran.micro for ran in self._ran])
        return whole, torch.cat([done.logp for done in dones]), torch.cat([done.keep for done in dones])

    def _micros(self, candidates: list[Candidate], references: list[Tensor]) -> list[Micro]:
        in_reward = self._config.loss.kl_in == "reward"
        nothing = torch.zeros(0)
        advantages = advantages_of(candidates, references if in_reward else [nothing] * len(candidates), self._config)
        return [
            micro_of(candidate, each, nothing if in_reward else reference)
            for candidate, each, reference in zip(candidates, advantages, references, strict=True)
        ]

    def _reference_of(self, candidate: Candidate) -> Tensor:
        """[T] of all that was sampled; empty without a reference."""
        data = candidate.packed
        return self._computes.reference(Text(data.token_ids, data.sampled, data.branches))

    def _across(self, micros: list[Micro]) -> Iterable[Tensor]:
        """What of each micro-batch the rule over all of them keeps."""
        logps = [self._computes.current(Text(each.token_ids, each.trainable, each.branches)) for each in micros]
        keep = self._objective.across(joined(micros), torch.cat(logps))
        return keep.split([len(micro.token_ids) for micro in micros])

    def _run(self, micros: list[Micro], stopping: Callable[[], bool], across: Iterable[Tensor] | None = None) -> None:
        for micro, keep in zip(micros, across or [micro.trainable for micro in micros], strict=True):
            self._stopped = self._stopped or stopping()
            if self._stopped:
                return
            done = self._computes.backward(micro, keep, self._version)
            self._ran.append(_Ran(micro._replace(reference=micro.reference[:0]), done))

    def _stepped(self, began: float) -> tuple[StepStats, list[Fate]]:
        whole, logp, keep = self._joined()
        _, self._weights, _, stats = self._objective.weigh(whole, logp, keep, self._version)
        count = max(1, int(whole.trainable.sum()))
        denominator = self._objective.denominator(count, len(whole.cu_seqlens) - 1)
        scale = math.sqrt(stats.ess) if self._config.learner.ess_lr else 1.0
        stepped = self._computes.step(self._version, denominator, scale)
        # A learner that resumed meets tokens of versions that it is about to make again: they are not stale.
        staleness = (self._version - whole.versions[keep]).clamp(min=0).sort().values.tolist()
        seconds = self._seconds + time.monotonic() - began
        done = StepStats(
            loss=sum(ran.done.policy for ran in self._ran) / denominator,
            kl=sum(ran.done.kl for ran in self._ran) / denominator,
            entropy=sum(ran.done.entropy for ran in self._ran) / count,
            grad_norm=stepped.grad_norm,
            skipped=stepped.skipped,
            lr=stepped.lr,
            clip_fraction=sum(ran.done.clipped for ran in self._ran) / count,
            ess=stats.ess,
            weight_mean=stats.weight_mean,
            clipped_fraction=stats.clipped_fraction,
            masked_fraction=1 - int(keep.sum()) / count,
            kl_k1=stats.kl_k1,
            kl_k3=stats.kl_k3,
            max_prob_diff=stats.max_prob_diff,
            staleness_mean=sum(staleness) / max(1, len(staleness)),
            staleness_p99=staleness[math.ceil(0.99 * len(staleness)) - 1] if staleness else 0,
            staleness_max=staleness[-1] if staleness else 0,
            tokens=len(whole.token_ids),
            trained=len(staleness),
            micro_batches=len(self._ran),
            seconds=seconds,
            hidden=self._early / seconds,
        )
        return done, self._fates(keep)

    def _fates(self, keep: Tensor) -> list[Fate]:
        """`keep` is over the tokens that were forwarded."""
        places = [present(candidate)[1] for candidate in self._candidates]
        fates: list[Fate] = []
        parts = keep.split([int(place.sum()) for place in places])
        for candidate, place, part in zip(self._candidates, places, parts, strict=True):
            of_group = torch.zeros_like(place)
            of_group[place] = part
            fates.extend(fates_of(candidate, of_group))
        return fates
