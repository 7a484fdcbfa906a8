"""What computes: the model and its optimizer, asked for log-probs, gradients and steps.

Invariant: gradients of `backward` add up until `step` or `clear`. What comes back is on the CPU. Trainer does not know
whether it speaks with one process's worker or with all ranks at once (`ranks.Leader`).
"""

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.config import Config
from slipstream.learner import checkpoint
from slipstream.learner.micro import Micro
from slipstream.learner.objective import Objective
from slipstream.learner.optimizer import Optimizer, Stepped
from slipstream.learner.policy import Policy


class Text(NamedTuple):
    """Sequences, each with a past of its own, and the tokens whose log-probs are asked for."""

    token_ids: Tensor  # int [T]
    wanted: Tensor  # bool [T]
    cu_seqlens: Tensor  # int32 [N+1]


class Done(NamedTuple):
    """A micro-batch that ran. Sums over its tokens; `keep` is what entered the loss."""

    logp: Tensor  # [T]
    keep: Tensor  # bool [T]
    policy: float
    kl: float
    clipped: float
    entropy: float


class Computes(Protocol):
    def current(self, text: Text) -> Tensor:
        """[T]: the policy's log-probs; 0 where not wanted. No gradient."""
        ...

    def reference(self, text: Text) -> Tensor:
        """[T]: the start model's log-probs, or empty where the loss needs none."""
        ...

    def backward(self, micro: Micro, across: Tensor, version: int) -> Done: ...

    def step(self, number: int, divisor: float, scale: float) -> Stepped: ...

    def clear(self) -> None: ...

    def tensors(self) -> dict[str, Tensor]:
        """What is published: whole, named as in a Hugging Face folder."""
        ...

    def keep_in(self, folder: Path, number: int) -> None:
        """Where checkpoints are saved, and how many of them stay."""
        ...

    def save(self, version: int) -> None:
        """Begins to; rank 0's `Worker.saver` says when it is on disk."""
        ...

    def load(self, path: Path) -> int:
        """The version of the checkpoint at `path`. Raises checkpoint.UNREADABLE."""
        ...

    def leave(self) -> None:
        """Nothing more is asked of it."""
        ...


class Worker:
    """One process's."""

    def __init__(
        self, config: Config, policy: Policy, optimizer: Optimizer, *, group: Any = None, first: bool = True
    ) -> None:
        """Of several ranks: the process `group` for checkpoints, and whether this is the first of them."""
        self.policy, self.optimizer = policy, optimizer
        self._group, self._first = group, first
        self._saver: checkpoint.Saver | None = None
        self._objective = Objective(config)
        self.start: Policy | None = None
        if config.loss.kl_coef:
            self.start = Policy(
                config.model.path,
                chunk_tokens=config.learner.chunk_tokens,
                temperature=config.rollout.temperature,
                mesh=policy.mesh,
            )

    @property
    def saver(self) -> checkpoint.Saver:
        """This process's part in saving, once `keep_in` said where."""
        if self._saver is None:
            raise RuntimeError("keep_in was not called")
        return self._saver

    def current(self, text: Text) -> Tensor:
        return _logprobs(self.policy, text)

    def reference(self, text: Text) -> Tensor:
        return torch.zeros(0) if self.start is None else _logprobs(self.start, text)

    def backward(self, micro: Micro, across: Tensor, version: int) -> Done:
        """`across` bool [T]: what a rule over the whole batch leaves."""
        here = micro.to(self.policy.device)
        current = self.policy.logprobs(
            here.token_ids, here.trainable, here.branches, entropy_gradient=self._objective.entropy_gradient
        )
        logp = current.logp.detach()
        weighed = self._objective.weigh(here, logp, across.to(self.policy.device), version)
        loss = self._objective.loss(here, current, weighed)
        if loss.total.requires_grad:  # it does not if there was no log-prob to compute
            loss.total.backward()
        entropy = float(current.entropy.detach().sum())
        return Done(logp.cpu(), weighed.keep.cpu(), loss.policy, loss.kl, loss.clipped, entropy)

    def step(self, number: int, divisor: float, scale: float) -> Stepped:
        return self.optimizer.step(number, divisor=divisor, scale=scale)

    def clear(self) -> None:
        self.optimizer.clear()

    def tensors(self) -> dict[str, Tensor]:
        return self.policy.tensors()

    def keep_in(self, folder: Path, number: int) -> None:
        self._saver = checkpoint.Saver(folder, number, self._group, self._first)

    def save(self, version: int) -> None:
        self.saver.save(version, self.policy, self.optimizer)

    def load(self, path: Path) -> int:
        return checkpoint.load(path, self.policy, self.optimizer, self._group)

    def leave(self) -> None:
        """What is being saved is finished."""
        if self._saver is not None:
            self._saver.wait()
            self._saver.close()


@torch.no_grad()
def _logprobs(policy: Policy, text: Text) -> Tensor:
    return policy.logprobs(*(tensor.to(policy.device) for tensor in text)).logp.cpu()
