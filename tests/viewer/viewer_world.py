"""A run's directory as the viewer finds it, made by hand: journal, recorded steps, config, tokenizer."""

import json
import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer

from slipstream.config import Config, RunDir
from slipstream.configfile import write_config
from slipstream.observe.steps import StepTokens, write_step
from slipstream.queue import encode
from slipstream.queue import events as ev
from slipstream.queue.journal import Journal
from slipstream.queue.messages import Fate, Weights
from slipstream.queue.state import LedgerState
from slipstream.trajectory import Outcome, Span, SpanKind, Trajectory, TrajectoryDetail, VersionRun

# What a model may say to harm the page, or to look like something else.
HOSTILE = (
    "</script><script>window.hurt=1</script><img src=x onerror='window.hurt=1'>"
    "\u2028\u2029\u202e<!-- \x00\ufeff é 日本 🦀"
)
TAKE = re.compile(r'slipstream\.take\("(\w+)",(\d+),(.*)\);\n', re.DOTALL)


class World:
    """Call `close` before reading the journal."""

    def __init__(self, root: Path, model: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.run_dir, self.model = RunDir(root), model
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        raw = {"model": {"path": str(model)}, "environment": {"path": "e.py:e"}, "tasks": {"train": "t.jsonl"}}
        self.config = msgspec.convert(raw, Config)
        write_config(self.config, self.run_dir.config)
        self.journal = Journal(self.run_dir.journal)
        self.journal.append([ev.RunBegun("run", 0, "")])
        self.made: dict[int, Trajectory] = {}

    def trajectory(
        self,
        lease: int,
        group: int,
        *,
        said: Sequence[str] = ("yes",),
        asked: str = "What?",
        tool: str = "look",
        versions: Sequence[int] = (0,),
        reward: float | None = 1.0,
        outcome: Outcome = Outcome.FINISHED,
        error: str = "",
        detail: bytes | None = None,
    ) -> Trajectory:
        """Turns of the model, with a tool's result between two; `versions` one a turn, the last for the rest."""
        pieces: list[tuple[SpanKind, int, str]] = [(SpanKind.PROMPT, 0, f"<|im_start|>{asked}<|im_end|>")]
        for turn, text in enumerate(said):
            pieces += [(SpanKind.TOOL, turn, f"<{tool}>")] if turn else []
            pieces.append((SpanKind.SAMPLED, turn, text))
        ids: list[int] = []
        spans: list[Span] = []
        runs: list[VersionRun] = []
        sampled = bytearray()
        for kind, turn, text in pieces:
            of_text = self.tokenizer.encode(text, add_special_tokens=False).ids
            spans.append(Span(kind, turn, len(ids), len(of_text)))
            of_model = kind == SpanKind.SAMPLED
            runs.append(VersionRun(len(of_text), versions[min(turn, len(versions) - 1)] if of_model else -1))
            sampled += bytes([of_model]) * len(of_text)
            ids += of_text
        logprobs = [-(0.01 + 0.001 * (place % 90)) * flag for place, flag in enumerate(sampled)]
        call = {"type": "function", "function": {"name": tool, "arguments": "{}"}}
        messages: list[dict[str, object]] = [{"role": "user", "content": asked}]
        messages += [{"role": "assistant", "content": text, "tool_calls": [call]} for text in said[:-1]]
        messages += [{"role": "assistant", "content": text} for text in said[-1:]]
        self.made[lease] = Trajectory(
            lease=lease,
            group=group,
            task=f"task-{group}",
            attempt=0,
            token_ids=array("i", ids),
            sampled=sampled,
            logprobs=array("f", logprobs),
            version_runs=runs,
            spans=spans,
            outcome=outcome,
            reward=reward,
            reward_parts={"exact": reward or 0.0},
            turns=len(said),
            tool_calls=len(said) - 1,
            detail=msgspec.json.encode(TrajectoryDetail(messages=messages, error=error)) if detail is None else detail,
        )
        return self.made[lease]

    def deliver(self, *trajectories: Trajectory, verdict: str = "train") -> None:
        for each in trajectories:
            place = self.journal.append_trajectory(encode([each])[0])
            count = sum(each.sampled)
            event = ev.TrajectoryDelivered(each.lease, count, [], each.outcome, each.reward, verdict, place)
            self.journal.append([ev.LeasesGranted(1, "r", [ev.Grant(each.lease, each.group, 0, 0)]), event])

    def settle(self, *fates: Fate, version: int | None = None) -> None:
        self.journal.append([ev.FatesSettled(list(fates), version)])

    def train(self, version: int, *leases: int, stale: int = 0, cut: int = 0) -> None:
        counts = {lease: sum(self.made[lease].sampled) for lease in leases}
        self.settle(
            *(
                Fate(
                    lease=lease,
                    outcome="finished",
                    trained=count - stale - cut,
                    masked_stale=stale,
                    masked_mismatch=cut,
                )
                for lease, count in counts.items()
            ),
            version=version,
        )
        self.publish(version)

    def publish(self, version: int) -> None:
        self.journal.append([ev.WeightsPublished(Weights(version=version, location="", checksum="", tensors=[]))])

    def record(self, version: int, learnt: dict[int, tuple[float, list[float], list[bool]]]) -> None:
        """By lease: its advantage, the learner's log-probs, and which tokens were in the loss."""
        lengths = [len(logprobs) for _, logprobs, _ in learnt.values()]
        total = sum(lengths)
        write_step(
            self.run_dir.steps,
            version,
            StepTokens(
                leases=np.array(list(learnt), np.int64),
                advantages=np.array([advantage for advantage, _, _ in learnt.values()]),
                bounds=np.cumsum([0, *lengths]).astype(np.int32),
                logprobs=np.array([value for _, values, _ in learnt.values() for value in values], np.float32),
                weights=np.full(total, 0.75, np.float32),
                kept=np.array([flag for _, _, flags in learnt.values() for flag in flags], bool),
            ),
        )

    def compact(self) -> None:
        from slipstream.queue.journal import read_events

        state = LedgerState()
        for _, event in read_events(self.run_dir.journal):
            state.apply(event)
        self.journal.compact(state)

    def close(self) -> RunDir:
        self.journal.close()
        return self.run_dir


class Made:
    """What stands in a folder of pages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = (folder / "index.html").read_text()
        self.files = {path.name: path.read_text() for path in sorted(folder.glob("*.js"))}
        self.lines: list[dict[str, Any]] = []
        self.texts: list[str] = []
        pages: dict[int, Any] = {}
        for name, text in self.files.items():
            matched = TAKE.fullmatch(text)
            assert matched
            kind, number, value = matched[1], int(matched[2]), json.loads(matched[3])
            assert name == f"{kind}-{number:05d}.js"
            if kind == "list":
                self.lines += [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
            elif kind == "text":
                self.texts += value
            else:
                pages[number] = value
        self.pages = pages

    def line(self, lease: int) -> dict[str, Any]:
        return next(line for line in self.lines if line["lease"] == lease)

    def item(self, lease: int) -> dict[str, Any]:
        line = self.line(lease)
        item = self.pages[line["page"]]["items"][line["slot"]]
        assert item["lease"] == lease
        return item

    def text(self, lease: int) -> str:
        """As the page puts it together."""
        item, texts = self.item(lease), self.pages[self.line(lease)["page"]]["texts"]
        pieces = [texts[str(token)] for token in item["ids"]]
        for start, size, text in item["clusters"]:
            pieces[start : start + size] = [text, *[""] * (size - 1)]
        return "".join(pieces)
