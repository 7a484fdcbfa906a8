"""`slipstream simulate` as a user and a script see it."""

from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from slipstream.cli import main

WORDS = ["batch=8", "depth=3", "cutoff=8", "step_s=0.5", "latency=lognormal:1.0,1.0", "concurrency=32", "group=1"]


def test_scripts_get_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *WORDS, "batches=50", "--json"]) == 0
    result = msgspec.json.decode(capsys.readouterr().out)
    for key in (
        "staleness_mean",
        "staleness_max",
        "discarded_fraction",
        "learner_busy",
        "rollouter_busy",
        "length_bias",
    ):
        assert isinstance(result[key], int | float)
    assert result["accounts_hold"] is True


def test_people_get_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "run.svg"
    assert main(["simulate", *WORDS, "batches=50", "--svg", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "trained tokens by staleness" in said
    assert "in flight: holds" in said
    titles = [node.text or "" for node in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}title")]
    assert any("learner: " in title for title in titles)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["simulate", "dpth=3"], "did you mean depth=VALUE?"),
        (["simulate", *WORDS, "batches=9", "--svg", "/nowhere/x.svg"], "--svg /nowhere/x.svg: cannot be written"),
        (["simulate", "--run", "/nowhere"], "RUN = '/nowhere'"),
        (["advise", "/nowhere"], "RUN = '/nowhere'"),
    ],
)
def test_what_is_wrong_is_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_the_keys_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--keys"]) == 0
    assert "batches that generation may run ahead" in capsys.readouterr().out
