"""What a run came to, as a file and for a person."""

import io
import json
from pathlib import Path

import msgspec
from rich.console import Console

from slipstream.observe.summary import Busy, Summary

MADE = Summary(
    heldout_before=0.25,
    heldout_after=None,
    steps=3,
    wall_s=12.5,
    train_wall_s=10.0,
    tokens_generated=1234,
    tokens_trained=1000,
    staleness_mean=0.5,
    staleness_max=2,
    accounts_hold=False,
    accounts="1,234 tokens != 1,000 trained",
    weights_pause_ms_p50=None,
    mismatch_kl_k3=1e-6,
    restarts=1,
    busy=Busy(engine=0.9, learner=0.5),
    trajectories="/runs/[a]/journal",
    wandb="off",
)


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    MADE.write(path)
    assert msgspec.json.decode(path.read_bytes(), type=Summary) == MADE
    assert json.loads(path.read_bytes())["busy"] == {"engine": 0.9, "learner": 0.5}
    assert list(tmp_path.iterdir()) == [path]


def test_a_person_reads_what_was_not_measured_and_what_does_not_hold() -> None:
    out = io.StringIO()
    MADE.show(Console(file=out, width=120), Path("/runs/[a]/summary.json"))
    text = out.getvalue()
    for part in (
        "25.0% before, not measured after",
        "3 in 10 s of training, 12 s in all",
        "DO NOT HOLD: 1,234 tokens != 1,000 trained",
        "engine 90%, learner 50%",
        "not loaded",
        "/runs/[a]/journal",
        "/runs/[a]/summary.json",
    ):
        assert part in text
