"""The parts of a learner, made from a config: the same for a run, and for its replay.

Invariant: what these make of the same batches in the same order is the same to the bit on the same CPU.
"""

from typing import NamedTuple

import torch

from slipstream.config import Config
from slipstream.learner.optimizer import Optimizer, learning_rate
from slipstream.learner.policy import Policy
from slipstream.learner.ranks import Leader, Ranks
from slipstream.learner.step import Trainer
from slipstream.learner.worker import Computes, Worker


class Parts(NamedTuple):
    policy: Policy
    optimizer: Optimizer
    trainer: Trainer
    computes: Computes
    worker: Worker  # this process's


def settle_torch(config: Config) -> None:
    """Threads, seed, determinism: of the whole process, before anything is computed."""
    if config.learner.threads:
        torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.run.seed)
    torch.use_deterministic_algorithms(not torch.cuda.is_available())
    # It finds bugs, and takes 5% of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def assemble(config: Config, ranks: Ranks | None = None) -> Parts:
    """At version 0, the start model. Of `ranks`, the first's: the others have a `worker_of` each."""
    worker = worker_of(config, ranks)
    computes: Computes = worker if ranks is None else Leader(worker, ranks, config.learner.micro_tokens)
    trainer = Trainer(config, computes, 1 if ranks is None else ranks.size)
    return Parts(worker.policy, worker.optimizer, trainer, computes, worker)


def worker_of(config: Config, ranks: Ranks | None = None) -> Worker:
    policy = Policy(
        config.model.path,
        chunk_tokens=config.learner.chunk_tokens,
        temperature=config.rollout.temperature,
        mesh=None if ranks is None else ranks.mesh,
    )
    optimizer = Optimizer(
        policy.parameters(),
        rate=learning_rate(config.learner.lr, config.learner.warmup, config.run.steps, config.learner.schedule),
        clip_norm=config.learner.clip_norm,
        betas=config.learner.betas,
        weight_decay=config.learner.weight_decay,
    )
    if ranks is None:
        return Worker(config, policy, optimizer)
    return Worker(config, policy, optimizer, group=ranks.saving, first=ranks.rank == 0)
