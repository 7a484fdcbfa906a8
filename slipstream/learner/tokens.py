"""What a step made of each sampled token, as it is kept for the viewer.

Invariant: a recording never stops a run: a disk that takes it not costs one warning, and the viewer says what it has
not.
"""

import logging

import torch
from torch import Tensor

from slipstream.config import Config, RunDir
from slipstream.learner.micro import Micro, bounds_of
from slipstream.learner.packing import segment_sum
from slipstream.observe.steps import StepTokens, write_step

log = logging.getLogger(__name__)


def step_tokens(
    *, leases: Tensor, sampled: Tensor, whole: Micro, logp: Tensor, weights: Tensor, keep: Tensor
) -> StepTokens:
    """`leases` [N] and all else [T] of the trajectories that were forwarded."""
    counts = segment_sum(sampled.long(), whole.cu_seqlens)
    computed = torch.where(whole.trainable, logp.float(), torch.nan)
    # An advantage stands at every token of its trajectory, and no trajectory here is empty.
    return StepTokens(
        leases=leases.numpy(),
        advantages=whole.advantages[whole.cu_seqlens[:-1].long()].double().numpy(),
        bounds=bounds_of(counts).numpy(),
        logprobs=computed[sampled].numpy(),
        weights=weights.cpu().float()[sampled].numpy(),
        kept=keep[sampled].numpy(),
    )


class Recorder:
    """Writes steps where the journal is kept whole too: what one lets go, the other need not keep."""

    def __init__(self, config: Config, run_dir: RunDir) -> None:
        self._folder = run_dir.steps if config.queue.keep == "all" else None
        self._warned = False

    @property
    def wanted(self) -> bool:
        return self._folder is not None

    def write(self, version: int, tokens: StepTokens) -> None:
        if self._folder is None:
            return
        try:
            write_step(self._folder, version, tokens)
        except OSError as error:
            if not self._warned:
                log.warning(
                    "%s: tokens of step %d are not recorded (%s); training goes on", self._folder, version, error
                )
            self._warned = True
