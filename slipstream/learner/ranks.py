"""All ranks of a sharded learner as one worker.

Invariant: rank 0 decides, alone speaks with the queue, and hands every order to all ranks at once; each order is one
collective, so that all run the same number of forward and backward passes over the shards that they gather from each
other. A rank without a trajectory runs an empty micro-batch.

How the group comes together is `gathering`'s business. A rank that dies takes the others with it: the learner starts
again from its checkpoint.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slipstream.learner.balance import chosen, costs_of, deal
from slipstream.learner.checkpoint import UNREADABLE
from slipstream.learner.micro import Micro
from slipstream.learner.optimizer import Stepped
from slipstream.learner.worker import Done, Text, Worker

# Between two orders rank 0 waits for data, and says so. That it died is noticed at once: its connection closes.
ORDER_WAIT = timedelta(days=30)


class Backward(NamedTuple):
    micro: Micro
    across: Tensor
    version: int


class Logprobs(NamedTuple):
    text: Text
    of_start: bool


class Step(NamedTuple):
    number: int
    divisor: float
    scale: float


class Clear(NamedTuple):
    pass


class Tensors(NamedTuple):
    """Whole ones, to rank 0."""


class KeepIn(NamedTuple):
    folder: Path
    number: int


class Save(NamedTuple):
    version: int


class Load(NamedTuple):
    path: Path


class Leave(NamedTuple):
    pass


ANSWERED = (Backward, Logprobs)
Order = Backward | Logprobs | Step | Clear | Tensors | KeepIn | Save | Load | Leave


class Ranks:
    """This process's place among those of the initialized process group."""

    def __init__(self, device: str) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh: DeviceMesh = init_device_mesh(device, (self.size,))
        self._orders: Any = dist.new_group(backend="gloo", timeout=ORDER_WAIT)
        self.saving: Any = dist.new_group(backend="gloo")  # of the threads that write checkpoints

    def hand_out(self, orders: list[Order]) -> Order:
        """Rank 0: one order for each; its own comes back."""
        got: list[Any] = [None]
        dist.scatter_object_list(got, orders, src=0, group=self._orders)
        return got[0]

    def await_order(self) -> Order:
        got: list[Any] = [None]
        dist.scatter_object_list(got, None, src=0, group=self._orders)
        return got[0]

    def agreed(self, value: Any) -> Any:
        """Rank 0's."""
        got: list[Any] = [value]
        dist.broadcast_object_list(got, src=0, group=self._orders)
        return got[0]

    def answer(self, value: Any) -> list[Any]:
        """Every rank's, in their order, on rank 0; nothing on the others."""
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, found, dst=0, group=self._orders)
        return found or []


class Leader:
    """Rank 0's worker and all others behind it."""

    def __init__(self, worker: Worker, ranks: Ranks, budget: int) -> None:
        """`budget`: tokens of one rank's micro-batch."""
        self._worker, self._ranks, self._budget = worker, ranks, budget
        self._square = worker.policy.square

    def current(self, text: Text) -> Tensor:
        return self._logprobs(text, of_start=False)

    def reference(self, text: Text) -> Tensor:
        return self._logprobs(text, of_start=True) if self._worker.start is not None else torch.zeros(0)

    def backward(self, micro: Micro, across: Tensor, version: int) -> Done:
        """As many rounds as its tokens need; what comes back stands in the order of `micro`."""
        logp, keep = torch.zeros(len(micro.token_ids)), torch.zeros_like(micro.trainable)
        sums = torch.zeros(4, dtype=torch.float64)
        for places, part in self._dealt(micro):
            orders: list[Order] = [
                Backward(each, across[at] if len(at) else each.trainable, version)
                for each, at in zip(part, places, strict=True)
            ]
            for at, done in zip(places, self._asked(orders), strict=True):
                if not len(at):
                    continue
                logp = logp.to(done.logp.dtype)
                logp[at], keep[at] = done.logp, done.keep
                sums += torch.tensor([done.policy, done.kl, done.clipped, done.entropy], dtype=torch.float64)
        return Done(logp, keep, *sums.tolist())

    def step(self, number: int, divisor: float, scale: float) -> Stepped:
        # Sharded gradients are means over the ranks of sums that belong together.
        return self._told(Step(number, divisor / self._ranks.size, scale))

    def clear(self) -> None:
        self._told(Clear())

    def tensors(self) -> dict[str, Tensor]:
        """What is published: whole tensors, in main memory."""
        return self._told(Tensors())

    def keep_in(self, folder: Path, number: int) -> None:
        self._told(KeepIn(folder, number))

    def save(self, version: int) -> None:
        self._told(Save(version))

    def load(self, path: Path) -> int:
        return self._told(Load(path))

    def leave(self) -> None:
        self._told(Leave())

    def _logprobs(self, text: Text, of_start: bool) -> Tensor:
        logp = torch.zeros(len(text.token_ids))
        for places, part in self._dealt(_as_micro(text)):
            orders: list[Order] = [
                Logprobs(Text(each.token_ids, each.trainable, each.branches), of_start) for each in part
            ]
            for at, found in zip(places, self._asked(orders), strict=True):
                if len(at):
                    logp = logp.to(found.dtype)
                    logp[at] = found
        return logp

    def _asked(self, orders: list[Order]) -> list[Any]:
        """Each rank's answer to its order."""
        return self._ranks.answer(obey(self._worker, self._ranks.hand_out(orders)))

    def _told(self, order: Order) -> Any:
        """All do the same, and only what rank 0 makes of it is needed."""
        return obey(self._worker, self._ranks.hand_out([order] * self._ranks.size))

    def _dealt(self, micro: Micro) -> list[tuple[list[Tensor], list[Micro]]]:
        """Rounds: where each rank's tokens stand in `micro`, and its part, an empty one where there are none."""
        size = self._ranks.size
        lengths = (micro.cu_seqlens[1:] - micro.cu_seqlens[:-1]).tolist()
        bins = deal(lengths, costs_of(micro, self._square), size, self._budget)
        parts = [chosen(micro, trajectories) for trajectories in bins]
        return [
            (
                [at for _, at in parts[start : start + size]],
                [part if len(at) else EMPTY for part, at in parts[start : start + size]],
            )
            for start in range(0, len(parts), size)
        ]


def follow(worker: Worker, ranks: Ranks) -> None:
    """What a rank but the first does, until it is told to leave."""
    while True:
        order = ranks.await_order()
        made = None
        try:
            made = obey(worker, order)
        except UNREADABLE:
            if not isinstance(order, Load):  # then all could not, and rank 0 tries another
                raise
        if isinstance(order, ANSWERED):
            ranks.answer(made)
        if isinstance(order, Leave):
            return


def obey(worker: Worker, order: Order) -> Any:
    match order:
        case Backward():
            return worker.backward(order.micro, order.across, order.version)
        case Logprobs():
            return worker.reference(order.text) if order.of_start else worker.current(order.text)
        case Step():
            return worker.step(order.number, order.divisor, order.scale)
        case Clear():
            worker.clear()
        case Tensors():
            return worker.policy.tensors()
        case KeepIn():
            worker.keep_in(order.folder, order.number)
        case Save():
            worker.save(order.version)
        case Load():
            return worker.load(order.path)
        case Leave():
            worker.leave()
    return None


def _as_micro(text: Text) -> Micro:
    nothing = torch.zeros(0)
    return Micro(text.token_ids, text.wanted, nothing, nothing, nothing, nothing, text.cu_seqlens, text.cu_seqlens)


# Two tokens of which none counts: a forward and backward pass that adds nothing.
EMPTY = Micro(
    token_ids=torch.zeros(2, dtype=torch.int32),
    trainable=torch.zeros(2, dtype=torch.bool),
    rollout=torch.zeros(2),
    versions=torch.full((2,), -1, dtype=torch.int32),
    advantages=torch.zeros(2, dtype=torch.float64),
    reference=torch.zeros(0),
    cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
    branches=torch.tensor([0, 2], dtype=torch.int32),
)
