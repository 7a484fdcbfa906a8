"""What the learner's layout is worth: packed against padded, shared prompts, chunked against full logits.

Every number is a ratio of two things measured in this run, taking turns, each the best of `--repeat`. The last line is
one JSON object; with --json there is only that.

    python benchmarks/learner.py [--json] [--repeat 3]
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from slipstream.learner import sharing
from slipstream.learner.head import head_logprobs
from slipstream.learner.policy import Policy

MICRO = 8192
VOCABULARY, HIDDEN, ROWS, CHUNK = 150_000, 256, 2048, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the last line only")
    parser.add_argument("--repeat", type=int, default=3, help="measurements of each; the best one counts")
    parser.add_argument("--head", choices=["full", "chunked"], help=argparse.SUPPRESS)  # in a process of its own
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.head:
        print(json.dumps(measure_head(arguments.head, arguments.repeat)))
        return

    def say(line: str) -> None:
        if not arguments.json:
            print(line, flush=True)

    ratios = packing(arguments.repeat, say) | prompts(arguments.repeat, say) | logits(arguments.repeat, say)
    say("TRL's GRPO loss path: not measured; it needs an environment of its own, with TRL installed")
    print(json.dumps({name: round(value, 3) for name, value in ratios.items()}))


def packing(repeat: int, say: Callable[[str], None]) -> dict[str, float]:
    """Lognormal lengths of mean 400 and 99th percentile 4000, packed, against rows padded to the longest of a batch."""
    lengths = long_tail(32)
    with tempfile.TemporaryDirectory() as folder:
        policy = tiny_policy(Path(folder))
        packed, padded = best(
            repeat, lambda: train_packed(policy, lengths, MICRO), lambda: train_padded(policy, lengths, MICRO)
        )
    tokens = sum(lengths)
    say(f"{len(lengths)} trajectories, {tokens} tokens, longest {max(lengths)}")
    say(f"packed {tokens / packed:.0f} tokens/s, padded {tokens / padded:.0f}: {padded / packed:.2f} times")
    return {"packed_over_padded": padded / packed}


def prompts(repeat: int, say: Callable[[str], None]) -> dict[str, float]:
    """Groups of 8 with a prompt of 200 tokens and answers of 100: prompts once, against once for each member."""
    generator = torch.Generator().manual_seed(0)
    documents: list[Tensor] = []
    for _ in range(3):
        prompt = torch.randint(0, 512, (200,), generator=generator)
        documents += [torch.cat([prompt, torch.randint(0, 512, (100,), generator=generator)]) for _ in range(8)]
    ids, least = torch.cat(documents), sharing.LEAST
    bounds = torch.arange(0, len(ids) + 1, 300, dtype=torch.int32)
    wanted = torch.arange(len(ids)) % 300 >= 200
    with tempfile.TemporaryDirectory() as folder:
        policy = tiny_policy(Path(folder))

        def run(at_least: int) -> None:
            sharing.LEAST = at_least
            policy.logprobs(ids, wanted, bounds).logp.sum().backward()

        shared, apart = best(repeat, lambda: run(least), lambda: run(10**9))
        sharing.LEAST = least
    say(f"groups of 8, prompt 200, answer 100: prompts shared are {apart / shared:.2f} times as fast")
    return {"shared_over_apart": apart / shared}


def logits(repeat: int, say: Callable[[str], None]) -> dict[str, float]:
    """Log-probs at a vocabulary of 150k: `CHUNK` rows of logits at a time, against all of them."""
    found: dict[str, dict[str, float]] = {}
    for kind in ("full", "chunked"):
        command = [sys.executable, __file__, "--head", kind, "--repeat", str(repeat)]
        found[kind] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    memory = found["full"]["megabytes"] / found["chunked"]["megabytes"]
    speed = found["full"]["seconds"] / found["chunked"]["seconds"]
    say(f"{ROWS} rows, vocabulary {VOCABULARY}: full {found['full']}, chunked {found['chunked']}")
    say(f"chunked takes {1 / memory:.2f} of the memory, and is {speed:.2f} times as fast")
    return {"logits_memory_full_over_chunked": memory, "logits_speed_chunked_over_full": speed}


def measure_head(kind: str, repeat: int) -> dict[str, float]:
    """Peak memory beyond the inputs and the gradient of the table, and the best time of forward and backward."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).mul_(0.1).requires_grad_()
    weight.grad, hidden.grad = torch.zeros_like(weight), torch.zeros_like(hidden)
    ids = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)

    def full() -> None:
        table = torch.nn.functional.linear(hidden, weight).log_softmax(-1)
        table.gather(-1, ids[:, None]).sum().backward()

    def chunked() -> None:
        head_logprobs(hidden, weight, None, ids, temperature=1.0, chunk=CHUNK)[0].sum().backward()

    before = peak()
    (seconds,) = best(repeat, full if kind == "full" else chunked)
    return {"seconds": round(seconds, 3), "megabytes": round(peak() - before)}


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def best(repeat: int, *functions: Callable[[], None]) -> list[float]:
    """Seconds of each, the least of `repeat`, taking turns."""
    least = [math.inf] * len(functions)
    for _ in range(repeat):
        for index, function in enumerate(functions):
            began = time.perf_counter()
            function()
            least[index] = min(least[index], time.perf_counter() - began)
    return least


def long_tail(count: int) -> list[int]:
    """Evenly spaced quantiles of a lognormal of mean 400 whose 99th percentile is as near 4000 as one of that mean can
    have, the last one at 4000."""
    spread = 1.6
    normal = torch.distributions.Normal(math.log(400) - spread**2 / 2, spread)
    quantiles = (torch.arange(count) + 0.5) / count
    lengths = normal.icdf(quantiles).exp().clamp(8, 4000).round().int().tolist()
    lengths[-1] = 4000
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    return [lengths[index] for index in order]


def tiny_policy(folder: Path) -> Policy:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}
    Qwen3ForCausalLM(Qwen3Config(**shape, **heads, max_position_embeddings=4096)).save_pretrained(folder)
    return Policy(folder, chunk_tokens=1024)


def documents_of(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 512, (length,), generator=generator) for length in lengths]


def train_packed(policy: Policy, lengths: list[int], budget: int) -> None:
    for batch in batches(lengths, lambda group: sum(group) <= budget):
        ids = torch.cat(documents_of(batch))
        bounds = torch.tensor([0, *batch]).cumsum(0).int()
        policy.logprobs(ids, torch.ones(len(ids), dtype=torch.bool), bounds).logp.sum().backward()


def train_padded(policy: Policy, lengths: list[int], budget: int) -> None:
    """Through the same model and head, with rows of padding where the packed layout has none."""
    for batch in batches(lengths, lambda group: len(group) * max(group) <= budget):
        longest = max(batch)
        rows = torch.nn.utils.rnn.pad_sequence(documents_of(batch), batch_first=True)
        bounds = torch.arange(0, rows.numel() + 1, longest, dtype=torch.int32)
        wanted = (torch.arange(longest) < torch.tensor(batch)[:, None]).reshape(-1)
        policy.logprobs(rows.reshape(-1), wanted, bounds).logp.sum().backward()


def batches(lengths: list[int], fits: Callable[[list[int]], bool]) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for length in lengths:
        if found[-1] and not fits([*found[-1], length]):
            found.append([])
        found[-1].append(length)
    return found


if __name__ == "__main__":
    main()
