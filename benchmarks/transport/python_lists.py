"""msgspec structs of Python lists over ZeroMQ, one hop, no broker and no journal: the way of prime-rl, at its cheapest.

    python benchmarks/transport/python_lists.py COUNT

Its samples have these fields (`transports/rollouts/types.py`); its trainer makes tensors of the lists. Its second hop,
from the packer to the trainer's ranks, is left out.
"""

import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import msgspec
import torch
import zmq
from corpus import GROUP, Cost, Lists, Meter, lengths, lists, trajectories

AHEAD = 16  # batches in the pipe


class Sample(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    reward: float
    detail: bytes


class Batch(msgspec.Struct, array_like=True, gc=False):
    samples: list[Sample]


def sample(of: Lists) -> Sample:
    prompt = len(of.prompt_ids)
    total = prompt + len(of.response_ids)
    return Sample(
        token_ids=of.prompt_ids + of.response_ids,
        mask=[False] * prompt + [value == 1 for value in of.mask],
        logprobs=[0.0] * prompt + of.logprobs,
        temperatures=[1.0] * total,
        reward=of.reward,
        detail=of.detail,
    )


def produce(url: str, of_lengths: Sequence[int]) -> Cost:
    made = [lists(trajectory) for trajectory in trajectories(of_lengths)]
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.set_hwm(AHEAD)
        socket.bind(url)
        meter, encoder = Meter(), msgspec.msgpack.Encoder()
        for at in range(0, len(made), GROUP):
            socket.send(encoder.encode(Batch([sample(each) for each in made[at : at + GROUP]])), copy=False)
        return meter.cost(sum(of_lengths))


def consume(url: str, groups: int) -> Cost:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.set_hwm(AHEAD)
        socket.connect(url)
        meter, decoder, tokens = Meter(), msgspec.msgpack.Decoder(Batch), 0
        for _ in range(groups):
            batch = decoder.decode(socket.recv(copy=False).buffer)
            ids = torch.tensor([token for each in batch.samples for token in each.token_ids], dtype=torch.long)
            torch.tensor([value for each in batch.samples for value in each.mask], dtype=torch.bool)
            torch.tensor([value for each in batch.samples for value in each.logprobs], dtype=torch.float32)
            torch.tensor([value for each in batch.samples for value in each.temperatures], dtype=torch.float32)
            tokens += len(ids)
        return meter.cost(tokens)


def run(count: int) -> Cost:
    of_lengths = lengths(count)
    url = f"ipc://@slipstream-lists-{multiprocessing.current_process().pid}"
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as workers:
        consuming = workers.submit(consume, url, count // GROUP)
        sent = workers.submit(produce, url, of_lengths).result()
        received = consuming.result()
    assert sent.tokens == received.tokens
    print(f"CPU: sender {sent.cpu_s:.2f} s, receiver {received.cpu_s:.2f} s", file=sys.stderr)
    return Cost(sent.tokens, sent.cpu_s + received.cpu_s, max(sent.wall_s, received.wall_s))


if __name__ == "__main__":
    print(msgspec.json.encode(run(int(sys.argv[1]))).decode())
