"""Nested tensors through TransferQueue (its SimpleStorage): put by a rollouter, got and cleared by the trainer.

    python benchmarks/transport/transferqueue.py COUNT

A group is one `kv_batch_put` of jagged tensors, without padding. TransferQueue and Ray come from wherever PYTHONPATH
says. CPU seconds are those of all processes while samples move.
"""

import os
import sys
from collections import deque

import msgspec
import ray
import torch
import transfer_queue
from corpus import GROUP, Cost, Lists, lengths, lists, trajectories
from tensordict import NonTensorStack, TensorDict
from tree import TreeMeter

AHEAD = 8  # groups in the queue
PARTITION = "train"


def keys(group: int) -> list[str]:
    return [f"{group}-{member}" for member in range(GROUP)]


def fields(members: list[Lists]) -> TensorDict:
    def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    return TensorDict(
        {
            "input_ids": jagged([torch.tensor(each.prompt_ids + each.response_ids) for each in members]),
            "response_mask": jagged([torch.tensor(each.mask) for each in members]),
            "rollout_log_probs": jagged([torch.tensor(each.logprobs) for each in members]),
            "reward": torch.tensor([each.reward for each in members]),
            "detail": NonTensorStack(*[each.detail for each in members]),
        },
        batch_size=len(members),
    )


@ray.remote(num_cpus=0)
class Rollouter:
    def __init__(self, count: int) -> None:
        transfer_queue.init()
        self._made = [lists(trajectory) for trajectory in trajectories(lengths(count))]

    def ready(self) -> bool:
        return True

    def put(self, group: int) -> bool:
        members = self._made[group * GROUP : (group + 1) * GROUP]
        transfer_queue.kv_batch_put(keys=keys(group), partition_id=PARTITION, fields=fields(members))
        return True


def run(count: int) -> Cost:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    transfer_queue.init()
    rollouter = Rollouter.remote(count)
    ray.get(rollouter.ready.remote())
    groups = count // GROUP
    meter, tokens = TreeMeter(), 0
    puts = deque(rollouter.put.remote(group) for group in range(min(AHEAD, groups)))
    for taken in range(groups):
        assert ray.get(puts.popleft())
        if taken + AHEAD < groups:
            puts.append(rollouter.put.remote(taken + AHEAD))
        batch = transfer_queue.kv_batch_get(keys=keys(taken), partition_id=PARTITION)
        tokens += sum(len(row) for row in batch["input_ids"].unbind())
        transfer_queue.kv_clear(keys=keys(taken), partition_id=PARTITION)
    cost = meter.cost(tokens)
    assert tokens == sum(lengths(count))
    transfer_queue.close()
    ray.shutdown()
    return cost


if __name__ == "__main__":
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    print(msgspec.json.encode(run(int(sys.argv[1]))).decode())
