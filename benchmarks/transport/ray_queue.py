"""Cloudpickled padded batches through a Ray actor with a deque: the way of verl's fully asynchronous trainer.

    python benchmarks/transport/ray_queue.py COUNT

Its agent loop pads every sample to the configured prompt and response length, in int64, and pickles the batch
(`fully_async_policy/message_queue.py`, `agent_loop.py` of verl 0.9); its trainer unpickles and concatenates. Ray comes
from wherever PYTHONPATH says. CPU seconds are those of all of Ray's processes while samples move.
"""

import os
import sys
from collections import deque
from typing import Any

import msgspec
import numpy as np
import ray
import torch
from corpus import GROUP, LONGEST, PROMPT, Cost, Lists, lengths, lists, trajectories
from ray import cloudpickle
from torch import Tensor
from tree import TreeMeter

AHEAD = 8  # groups in the queue
RESPONSE = LONGEST - PROMPT


def padded(members: list[Lists]) -> dict[str, Any]:
    """Prompts padded on the left, responses on the right."""
    prompts = torch.stack([_pad(torch.tensor(each.prompt_ids), PROMPT, left=True) for each in members])
    responses = torch.stack([_pad(torch.tensor(each.response_ids), RESPONSE) for each in members])
    mask = torch.stack([_pad(torch.tensor(each.mask), RESPONSE) for each in members])
    logprobs = torch.stack([_pad(torch.tensor(each.logprobs), RESPONSE) for each in members])
    seen = [
        torch.cat(
            [
                _pad(torch.ones(len(each.prompt_ids), dtype=torch.long), PROMPT, left=True),
                _pad(torch.ones(len(each.response_ids), dtype=torch.long), RESPONSE),
            ]
        )
        for each in members
    ]
    attention = torch.stack(seen)
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": mask,
        "rollout_log_probs": logprobs,
        "reward": np.array([each.reward for each in members]),
        "detail": np.array([each.detail for each in members], dtype=object),
    }


def _pad(row: Tensor, length: int, *, left: bool = False) -> Tensor:
    missing = length - len(row)
    return torch.nn.functional.pad(row, (missing, 0) if left else (0, missing))


@ray.remote(num_cpus=0)
class Queue:
    def __init__(self) -> None:
        self._samples: deque[bytes] = deque()

    def put(self, sample: bytes) -> bool:
        self._samples.append(sample)
        return True

    def get(self) -> bytes:
        return self._samples.popleft()


@ray.remote(num_cpus=0)
class Rollouter:
    def __init__(self, queue: Any, count: int) -> None:
        self._queue = queue
        self._made = [lists(trajectory) for trajectory in trajectories(lengths(count))]

    def ready(self) -> bool:
        return True

    def put(self, group: int) -> bool:
        members = self._made[group * GROUP : (group + 1) * GROUP]
        return ray.get(self._queue.put.remote(cloudpickle.dumps(padded(members))))


def run(count: int) -> Cost:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    queue = Queue.remote()
    rollouter = Rollouter.remote(queue, count)
    ray.get(rollouter.ready.remote())
    groups = count // GROUP
    meter, tokens = TreeMeter(), 0
    puts = deque(rollouter.put.remote(group) for group in range(min(AHEAD, groups)))
    for taken in range(groups):
        assert ray.get(puts.popleft())
        if taken + AHEAD < groups:
            puts.append(rollouter.put.remote(taken + AHEAD))
        batch = cloudpickle.loads(ray.get(queue.get.remote()))
        tokens += int(batch["attention_mask"].sum())
    cost = meter.cost(tokens)
    assert tokens == sum(lengths(count))
    ray.shutdown()
    return cost


if __name__ == "__main__":
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    print(msgspec.json.encode(run(int(sys.argv[1]))).decode())
