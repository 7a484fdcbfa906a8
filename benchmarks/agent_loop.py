"""What a turn costs beside the engine: ours, and rendering the whole conversation anew with apply_chat_template.

Measured at turn 1, 8, 32 and 128 of conversations with one tool call a turn: the time between the end of one request
to the engine and the beginning of the next. And how late the event loop is with many trajectories at once, whose
engine answers after about a second a turn. The engine is a test's. The last line is one JSON object; with --json there
is only that.

    python benchmarks/agent_loop.py [--json] [--repeat 5] [--concurrent 256]
"""

import argparse
import asyncio
import gc
import json
import random
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from slipstream import AgentLoop, Environment, Task, reward, tool
from slipstream.agent_loop.renderer import Renderer, create_renderer, load_tokenizer
from slipstream.agent_loop.sampler import Finish, Sample, SampleRequest
from slipstream.agent_loop.text import Messages, envelope
from slipstream.config import RolloutSection
from slipstream.trajectory import Outcome, Trajectory, VersionRun

TURNS = (1, 8, 32, 128)
TEMPLATE = Path(__file__).parents[1] / "examples" / "calculator" / "chat_template.jinja"
THOUGHT = "Let me see what the shelf says about this one, before I answer. "
CALL = '<tool_call>\n{"name": "stock", "arguments": {"item": "tea"}}\n</tool_call>'
RESULT = "There are 12 packs of tea on the shelf, 4 of them open. " * 4
LIMITS = RolloutSection(max_tokens=10**6, max_turns=max(TURNS) + 2, max_seconds=600)
TICK = 0.005
SHARES = {"p50": 0.5, "p99": 0.99, "max": 1.0}


@tool
async def stock(item: str) -> str:
    """How many of an item are on the shelf."""
    return RESULT


@reward
def done(answer: str) -> bool:
    return "done" in answer


ENVIRONMENT = Environment(tools=[stock], rewards=[done], system="Use the tool. Then say done.")


class TestSampler:
    """Calls the tool for `turns` turns, each after `seconds()`, and notes when it was asked and when it answered."""

    max_model_len = 10**6

    def __init__(self, renderer: Renderer, turns: int, mean_seconds: float = 0.0) -> None:
        self._calls = array("i", [*renderer.encode(THOUGHT + CALL), renderer.stop_token_ids[0]])
        self._ends = array("i", [*renderer.encode("done"), renderer.stop_token_ids[0]])
        self._turns, self._mean = turns, mean_seconds
        self._random = random.Random(0)
        self._turn: dict[int, int] = {}
        self.answered = 0.0
        self.gaps: list[float] = []  # between an answer and the next question, of one trajectory at a time

    async def sample(self, request: SampleRequest) -> Sample:
        if self.answered:
            self.gaps.append(time.perf_counter() - self.answered)
        if self._mean:
            await asyncio.sleep(self._random.expovariate(1 / self._mean))
        trajectory = id(asyncio.current_task())
        turn = self._turn[trajectory] = self._turn.get(trajectory, 0) + 1
        ids = self._calls if turn <= self._turns else self._ends
        sample = Sample(
            token_ids=ids[:],
            logprobs=array("f", [-0.5]) * len(ids),
            version_runs=[VersionRun(len(ids), 0)],
            finish=Finish.STOP,
            t_first_token=time.time(),
            seconds=0.0,
        )
        self.answered = time.perf_counter()
        return sample


async def play(loop: AgentLoop, number: int) -> Trajectory:
    task = Task(id=str(number), prompt="How many packs of tea are left?")
    trajectory = await loop.run(lease=number, group=number, task=task, attempt=0, seed=number, t_leased=time.time())
    assert trajectory.outcome is Outcome.FINISHED, trajectory.detail
    return trajectory


def ours(renderer: Renderer) -> list[float]:
    """Seconds of each turn of one conversation: to read what was said, run the tool, render its result."""
    sampler = TestSampler(renderer, max(TURNS))

    async def one() -> None:
        await play(AgentLoop(ENVIRONMENT, renderer, sampler, LIMITS), 0)

    uvloop.run(one())
    return sampler.gaps


def rendering_anew(tokenizer: Any) -> dict[int, float]:
    """Seconds to render and tokenize the whole conversation after so many turns."""
    messages: Messages = ENVIRONMENT.first_messages(Task(id="", prompt="How many packs of tea are left?"))
    schemas = [envelope(each) for each in ENVIRONMENT.tools]
    function = {"name": "stock", "arguments": {"item": "tea"}}
    seconds: dict[int, float] = {}
    for turn in range(1, max(TURNS) + 1):
        said = {"role": "assistant", "content": THOUGHT, "tool_calls": [{"type": "function", "function": function}]}
        messages += [said, {"role": "tool", "name": "stock", "content": RESULT}]
        if turn in TURNS:
            began = time.perf_counter()
            tokenizer.apply_chat_template(
                messages, tools=schemas, add_generation_prompt=True, tokenize=True, return_dict=True
            )
            seconds[turn] = time.perf_counter() - began
    return seconds


class Lateness(NamedTuple):
    late: list[float]  # how late a timer of 5 ms was, each time, in order of size
    busy: list[float]  # what the loop's thread computed meanwhile
    turns_per_second: float


async def lateness(renderer: Renderer, concurrent: int, turns: int, mean_seconds: float) -> Lateness:
    """Of the event loop while so many trajectories run."""
    sampler = TestSampler(renderer, turns, mean_seconds)
    loop = AgentLoop(ENVIRONMENT, renderer, sampler, LIMITS)
    young, old, _ = gc.get_threshold()
    gc.set_threshold(young, old, 1000)  # as in the rollouter
    late, busy = list[float](), list[float]()
    watching = asyncio.create_task(watch(late, busy))
    began = time.perf_counter()
    await asyncio.gather(*(play(loop, number) for number in range(concurrent)))
    rate = concurrent * (turns + 1) / (time.perf_counter() - began)
    watching.cancel()
    return Lateness(sorted(late), sorted(busy), rate)


async def idle(seconds: float) -> list[float]:
    """The same while nothing runs in this process: what the machine's other work does to a timer."""
    young, old, _ = gc.get_threshold()
    gc.set_threshold(young, old, 1000)  # as in the rollouter
    late, busy = list[float](), list[float]()
    watching = asyncio.create_task(watch(late, busy))
    await asyncio.sleep(seconds)
    watching.cancel()
    return sorted(late)


async def watch(late: list[float], busy: list[float]) -> None:
    """`busy`: CPU time of the loop's thread meanwhile, which other processes on the machine do not lengthen."""
    while True:
        began, used = time.perf_counter(), time.thread_time()
        await asyncio.sleep(TICK)
        late.append(time.perf_counter() - began - TICK)
        busy.append(time.thread_time() - used)


def at(share: float, ordered: list[float]) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def small_model(folder: Path) -> Path:
    """A tokenizer with the demo's template: what is measured depends little on how many tokens it knows."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator([TEMPLATE.read_text(), THOUGHT, CALL, RESULT] * 4, trainer)
    marks = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
    core.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE.read_text(),
    ).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the last line only")
    parser.add_argument("--repeat", type=int, default=5, help="measurements of each; the best one counts")
    parser.add_argument("--concurrent", type=int, default=256, help="trajectories at once for the loop's lateness")
    parser.add_argument("--model", type=Path, help="a model folder whose tokenizer and template to use")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}

    def say(line: str) -> None:
        if not arguments.json:
            print(line, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        model = str(arguments.model or small_model(Path(folder)))
        renderer, tokenizer = create_renderer(model), load_tokenizer(model)
        ours(renderer), rendering_anew(tokenizer)  # templates are compiled once
        runs = [(ours(renderer), rendering_anew(tokenizer)) for _ in range(arguments.repeat)]
        for turn in TURNS:
            ahead = min(gap for gaps, _ in runs for gap in gaps[max(0, turn - 2) : turn + 1])
            anew = min(seconds[turn] for _, seconds in runs)
            figures[f"turn_{turn}_us"], figures[f"turn_{turn}_anew_us"] = ahead * 1e6, anew * 1e6
            figures[f"turn_{turn}_ratio"] = anew / ahead
            say(f"turn {turn:3}: {ahead * 1e6:6.0f} us, rendered anew {anew * 1e6:6.0f} us, {anew / ahead:5.1f} times")
        figures["growth"] = figures[f"turn_{TURNS[-1]}_us"] / figures[f"turn_{TURNS[1]}_us"]
        loop = uvloop.run(lateness(renderer, arguments.concurrent, turns=8, mean_seconds=1.0))
        alone = at(0.99, uvloop.run(idle(3.0)))
        figures |= {"concurrent": arguments.concurrent, "turns_per_second": loop.turns_per_second}
        figures |= {f"lag_{name}_ms": at(share, loop.late) * 1e3 for name, share in SHARES.items()}
        figures |= {f"busy_{name}_ms": at(share, loop.busy) * 1e3 for name, share in SHARES.items()}
        figures["lag_idle_p99_ms"] = alone * 1e3
        say(f"turn {TURNS[-1]} costs {figures['growth']:.2f} times what turn {TURNS[1]} does")
        say(f"{arguments.concurrent} trajectories, {loop.turns_per_second:.0f} turns/s; the event loop is late by, ms:")
        say(
            "  "
            + ", ".join(f"{name} {figures[f'lag_{name}_ms']:.1f}" for name in SHARES)
            + " (most, as they all begin)"
        )
        say("  of which it computed " + ", ".join(f"{name} {figures[f'busy_{name}_ms']:.1f}" for name in SHARES))
        say(f"  an idle loop on this machine, now: p99 {alone * 1e3:.1f}")
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
