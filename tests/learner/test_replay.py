"""Replay and export of a run that was recorded with real processes and a kill."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

import msgspec
import pytest
import torch
from learner_run import ended, settings, until, world
from learner_world import VOCABULARY

from slipstream import cli
from slipstream.config import Config, RunDir
from slipstream.configfile import read_config
from slipstream.errors import UserError
from slipstream.learner import checkpoint
from slipstream.learner.comparison import Whole, mean
from slipstream.learner.export import export
from slipstream.learner.folder import write_folder
from slipstream.learner.optimizer import Optimizer
from slipstream.learner.policy import Policy
from slipstream.learner.publisher import as_published
from slipstream.learner.recording import Recording, read_recording, recording_of
from slipstream.learner.replay import Numbers, Replay, refuse_others
from slipstream.queue import events as ev
from slipstream.queue.messages import Fate, Weights
from slipstream.trajectory import Outcome
from slipstream.weights_file import checksum

STEPS = 9


@pytest.fixture(scope="module")
def recorded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, processes: ForkServerContext) -> RunDir:
    """Nine versions; the learner was killed on the way. Checkpoints of 6 and 9 are there, written every three."""
    root = tmp_path_factory.mktemp("recorded")

    async def record() -> None:
        async with world(settings(tiny_model, steps=STEPS, every=3), root, processes) as (here, _):
            learner = here.start("learner")
            await until(lambda: len(here.metrics()) >= 5)
            os.kill(learner.pid or 0, signal.SIGKILL)
            await ended(learner)
            assert await ended(here.start("learner")) == 0

    asyncio.run(record())
    return RunDir(root)


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """A replay settles seed and determinism for its whole process."""
    state = torch.get_rng_state()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_rng_state(state)


def config_of(run_dir: RunDir, *overrides: str) -> Config:
    return read_config(run_dir.config, overrides, files=False)


# -- replay --------------------------------------------------------------------------------------------------------


def test_unchanged_it_makes_every_version_to_the_bit(recorded: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(recorded.root), "--json"]) == 0
    whole = msgspec.json.decode(capsys.readouterr().out, type=Whole)
    assert whole.identical
    assert [step.version for step in whole.versions] == list(range(1, STEPS + 1))
    assert all(step.recorded == step.replayed for step in whole.versions)
    assert whole.before == whole.now  # also what the metrics said
    assert all(value is not None for value in msgspec.structs.astuple(whole.now))


def test_overrides_stand_beside_the_run(recorded: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(recorded.root), "loss.name=cispo", "correction.presets=[]"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "recorded / replayed"
    assert len(lines) == STEPS + 4
    assert lines[2].count(" / ") == 5
    assert lines[-1] == "with loss.name=cispo, correction.presets=[] it differs from version 1 on"
    assert lines[2].endswith("  differs")


def test_a_run_that_is_not_what_its_config_makes_is_found_out(recorded: RunDir) -> None:
    """The first version that differs is named: here the one whose step had another learning rate."""
    other = msgspec.structs.replace(
        config_of(recorded), learner=msgspec.structs.replace(config_of(recorded).learner, schedule="cosine")
    )
    replay = Replay(other, recorded)
    steps = list(replay)
    verdict = replay.verdict()
    assert not verdict.identical
    # Two steps of warm-up, and the third is at the peak of either schedule.
    assert verdict.first_difference == 4
    assert [step.recorded == step.replayed for step in steps[:4]] == [True, True, True, False]


def test_exit_code_1_and_the_version_when_it_differs(
    recorded: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = RunDir(tmp_path / "run")
    shutil.copytree(recorded.root, copy.root, ignore=shutil.ignore_patterns("queue.*", "*.sock"))
    text = copy.config.read_text()
    assert "warmup = 2" in text
    copy.config.write_text(text.replace("warmup = 2", "warmup = 1"))
    assert cli.main(["replay", str(copy.root)]) == 1
    assert "DIFFERS: version 1 is the first that is not what was published" in capsys.readouterr().out


def test_a_change_that_drops_whole_batches_leaves_versions_without_a_step(recorded: RunDir) -> None:
    replay = Replay(config_of(recorded, "outcomes.finished=mask"), recorded, ["outcomes.finished=mask"])
    steps = list(replay)
    assert {step.groups for step in steps} == {0}
    assert len({step.replayed for step in steps}) == 1
    assert steps[0].now == Numbers(None, None, None, None, None)
    assert mean([step.now for step in steps]) == steps[0].now


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.group=4", "has no effect on a replay"),
        ("tasks.train=a.jsonl", "has no effect on a replay"),
        ("learner.checkpoints=4", "has no effect on a replay"),
        ("learner.batch=4", "is recorded with the batches"),
    ],
)
def test_overrides_without_effect_are_refused(recorded: RunDir, override: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        refuse_others([override])


def test_what_cannot_be_replayed_is_said_in_one_line(
    recorded: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(recorded.config, tmp_path / "config.toml")
    assert cli.main(["replay", str(tmp_path)]) == 2
    assert "it has no journal" in capsys.readouterr().err
    assert cli.main(["replay", str(recorded.root), "loss.nmae=ppo"]) == 2
    assert "loss.name" in capsys.readouterr().err


# -- the recording -------------------------------------------------------------------------------------------------


def weights(version: int, of: str) -> ev.WeightsPublished:
    return ev.WeightsPublished(Weights(version=version, location="", checksum=of, tensors=[]))


def settled(version: int | None, *leases: int) -> ev.FatesSettled:
    return ev.FatesSettled([Fate(lease=lease, outcome="finished", trained=1) for lease in leases], version)


def test_the_last_timeline_counts(tmp_path: Path) -> None:
    grants = [ev.Grant(lease, lease // 2, lease % 2, 0) for lease in range(8)]
    delivered = [
        ev.TrajectoryDelivered(lease, 1, [], Outcome.FINISHED, 1.0, "train", ev.Place(0, lease, 1))
        for lease in range(8)
    ]
    joined = ev.LearnerJoined("learner", 2, 1, 0)
    recording = recording_of(
        tmp_path,
        iter(
            [
                ev.LeasesGranted(1, "r", grants),
                *delivered,
                weights(0, "a"),
                settled(None, 0, 1),
                *(weights(1, "b"), settled(1, 4, 5, 2, 3)),
                *(weights(2, "c"), settled(2, 6, 7)),
                joined,
                weights(1, "b"),
                *(weights(2, "d"), settled(2, 6, 7)),
                weights(3, "e"),  # and it was killed before it could say of what
            ]
        ),
    )
    assert [[fate.lease for fate in group.fates] for group in recording.batches[1]] == [[4, 5], [2, 3]]
    assert [group.group for group in recording.batches[1]] == [2, 1]
    assert list(recording.versions()) == [1, 2]
    assert recording.checksums == {0: ["a"], 1: ["b"], 2: ["c", "d"], 3: ["e"]}
    del recording.batches[1]
    with pytest.raises(UserError, match="does not say what version 1 was made of"):
        recording.versions()


def test_every_trajectory_is_in_one_batch_of_a_real_run(recorded: RunDir) -> None:
    recording: Recording = read_recording(recorded.journal)
    leases = [fate.lease for batch in recording.batches.values() for group in batch for fate in group.fates]
    assert len(leases) == len(set(leases)) > 0
    assert all(len(sums) == 1 for sums in recording.checksums.values())


# -- export --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["latest", "6", "8", "0"])
def test_any_version_is_exported_as_it_was_published(recorded: RunDir, tmp_path: Path, version: str) -> None:
    """Those without a checkpoint are made again."""
    made = export(config_of(recorded), recorded, version, tmp_path / "out")
    number = STEPS if version == "latest" else int(version)
    assert (made.version, made.checked) == (number, True)
    assert made.checksum == read_recording(recorded.journal).checksums[number][-1]
    again = Policy(tmp_path / "out", chunk_tokens=8)
    assert checksum(as_published(again.tensors())) == made.checksum


def test_past_a_damaged_checkpoint(recorded: RunDir, tmp_path: Path) -> None:
    copy = RunDir(tmp_path / "run")
    shutil.copytree(recorded.root, copy.root, ignore=shutil.ignore_patterns("queue.*", "*.sock"))
    (copy.checkpoints / f"v{STEPS:08d}" / ".metadata").write_bytes(b"junk")
    assert export(config_of(copy), copy, "latest", tmp_path / "out").checked


def test_what_is_not_what_was_published_is_not_exported(
    recorded: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = RunDir(tmp_path / "run")
    shutil.copytree(recorded.root, copy.root, ignore=shutil.ignore_patterns("queue.*", "*.sock"))
    newest, before = reversed(checkpoint.whole(copy.checkpoints))
    shutil.rmtree(newest)
    shutil.copytree(before, newest)
    assert cli.main(["export", str(copy.root), "--out", str(tmp_path / "out")]) == 2
    assert "is not what the run published" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_bad_arguments_of_export(recorded: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def says(*arguments: str) -> str:
        assert cli.main(["export", str(recorded.root), *arguments]) == 2
        return capsys.readouterr().err

    assert "versions 0 to 9; write one of them, or latest" in says("--out", str(tmp_path / "a"), "--version", "12")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").touch()
    assert "is there already" in says("--out", str(tmp_path / "b"))
    assert (tmp_path / "b" / "mine").is_file()


LOADED = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
ids = torch.arange(2, 14)[None]
logits = model(ids).logits[0].log_softmax(-1)
tokenizer = AutoTokenizer.from_pretrained(folder)
from vllm.tokenizers import get_tokenizer
theirs = get_tokenizer(folder)
said = [{"role": "user", "content": "w7 w9"}]
print(json.dumps({
    "last": logits[-1].tolist(),
    "each": logits[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist(),
    "text": tokenizer.apply_chat_template(said, tokenize=False),
    "vllm": theirs.apply_chat_template(said, tokenize=False),
    "ids": [tokenizer.encode("w7"), theirs.encode("w7")],
}))
"""


def test_transformers_and_vllm_load_it_and_say_the_same(recorded: RunDir, tmp_path: Path, tiny_model: Path) -> None:
    """In another process, by their own means."""
    made = export(config_of(recorded), recorded, "latest", tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (tiny_model / name).read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(tmp_path / "out")], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    policy = Policy(tiny_model, chunk_tokens=8)
    adamw = Optimizer(policy.parameters(), rate=lambda _: 0.1, clip_norm=1.0, betas=(0.9, 0.95), weight_decay=0.0)
    assert checkpoint.load(recorded.checkpoints / f"v{made.version:08d}", policy, adamw) == made.version
    ids = torch.arange(2, 14)
    following = [torch.cat([ids, torch.tensor([token])]) for token in range(VOCABULARY)]
    bounds = torch.arange(VOCABULARY + 1, dtype=torch.int32) * len(following[0])
    with torch.no_grad():
        packed = torch.cat(following)
        ours = policy.logprobs(packed, torch.ones_like(packed, dtype=torch.bool), bounds).logp.view(VOCABULARY, -1)
    assert theirs["last"] == pytest.approx(ours[:, -1].tolist(), abs=1e-5)
    assert max(range(VOCABULARY), key=theirs["last"].__getitem__) == int(ours[:, -1].argmax())  # greedily
    assert theirs["each"] == pytest.approx(ours[0, 1:-1].tolist(), abs=1e-5)
    assert theirs["text"] == theirs["vllm"] == "w7 w9"
    assert theirs["ids"] == [[7], [7]]


def test_what_lies_beside_a_model_comes_along_and_its_weights_do_not(tiny_model: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    shutil.copytree(tiny_model, start)
    for name in ("merges.txt", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "README.md"):
        (start / name).write_text(name)
    policy = Policy(tiny_model, chunk_tokens=8)
    write_folder(tmp_path / "out", policy, policy.tensors(), start)
    there = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"merges.txt", "model.safetensors", "config.json", "tokenizer.json"} <= there
    assert not there & {"model-00001-of-00002.safetensors", "model.safetensors.index.json", "README.md"}
