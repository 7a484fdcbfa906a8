"""The data files against the journal; what is hostile stays data; mistakes are one line."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from viewer_world import HOSTILE, Made, World

from slipstream.queue import read_trajectories
from slipstream.viewer import folder as folder_module
from slipstream.viewer.folder import script_safe
from slipstream.viewer.rows import SCALE, SEARCHED

View = Callable[..., tuple[int, str, str]]


@pytest.fixture
def made(full: World, view: View, tmp_path: Path) -> Made:
    code, out, _ = view(full.run_dir.root, "--out", tmp_path / "pages")
    assert (code, out) == (0, f"{(tmp_path / 'pages' / 'index.html').as_uri()}\n")
    return Made(tmp_path / "pages")


def test_every_token_is_there_as_the_journal_has_it(full: World, made: Made) -> None:
    rows = [row.to_pylist()[0] for row in read_trajectories(full.run_dir.journal)]
    assert [line["lease"] for line in made.lines] == [row["lease"] for row in rows] == list(range(1, 9))
    for row in rows:
        item = made.item(row["lease"])
        assert item["ids"] == row["token_ids"]
        assert item["runs"] == [[run["length"], run["version"]] for run in row["version_runs"]]
        assert [(kind, start, length) for kind, _, start, length in item["spans"]] == [
            (["prompt", "sampled", "tool", "glue"][span["kind"]], span["start"], span["length"])
            for span in row["spans"]
        ]
        of_sampled = [p for p, flag in zip(row["logprobs"], row["sampled"], strict=True) if flag]
        assert [number / SCALE for number in item["engine"]] == pytest.approx(of_sampled, abs=0.51 / SCALE)
        assert made.text(row["lease"]) == full.tokenizer.decode(row["token_ids"], skip_special_tokens=False)


def test_a_line_says_what_became_of_it(made: Made) -> None:
    fates = {line["lease"]: (line["fate"], line["step"], line["stale"], line["outcome"]) for line in made.lines}
    assert fates == {
        1: ("trained in part", 1, 0, "finished"),
        2: ("trained", 2, 1, "finished"),
        3: ("zero signal", None, 0, "finished"),
        4: ("zero signal", None, 0, "finished"),
        5: ("failed", None, None, "timeout"),
        6: ("held-out", None, None, "finished"),
        7: ("not used yet", None, None, "finished"),
        8: ("not used yet", None, None, "finished"),
    }
    assert made.line(1) | {"page": 0, "slot": 0} == made.line(1)
    assert (made.line(1)["tools"], made.line(1)["question"], made.line(1)["answer"]) == (["look"], "What?", "it is 4")
    assert [made.line(lease)["heldout"] for lease in (5, 6)] == [False, True]


def test_the_learners_numbers_are_there_where_they_were_recorded(full: World, made: Made) -> None:
    item = made.item(1)
    differences = {learner - engine for learner, engine in zip(item["learner"], item["engine"], strict=True)}
    assert differences <= {199, 200, 201}
    assert item["weights"] == [7500] * len(item["engine"])
    assert item["kept"] == "00" + "1" * (len(item["engine"]) - 2)
    assert item["advantage"] == 0.7071
    for lease in range(2, 9):
        other = made.item(lease)
        assert (other["learner"], other["weights"], other["kept"], other["advantage"]) == (None,) * 4
    assert '"recorded":1,' in made.index


def test_hostile_text_is_data_and_nothing_else(made: Made) -> None:
    assert HOSTILE in made.text(7)
    assert made.item(7)["error"] == HOSTILE
    assert made.texts[6].count("window.hurt") >= 4
    for text in made.files.values():
        assert not set(text) & {"<", "\u2028", "\u2029"}
        assert text.count("\n") == 1  # its end
    assert "hurt" not in made.index


def test_a_runs_name_may_be_hostile_too(models: Path, tmp_path: Path, view: View) -> None:
    world = World(tmp_path / "<script>window.hurt=1<!-- DIGEST", models / "stable")
    world.close()
    assert view(world.run_dir.root)[0] == 0
    index = (world.run_dir.view / "index.html").read_text()
    assert "<script>window.hurt" not in index
    assert index.count("</script>") == 1


def test_what_stands_in_a_script_is_safe() -> None:
    value = {"</script>": ["<!--", "\u2028\u2029", "\x00", '"', "\\"]}
    said = script_safe(value).decode()
    assert json.loads(said) == value
    assert not set(said) & {"<", "\u2028", "\u2029", "\x00", "\n"}


@pytest.mark.parametrize(
    "detail",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"messages":[{"role":"user","content":[{"type":"image"},{"type":"text","text":"seen"}]}]}',
        b'{"messages":{"of":"another shape"},"error":"seen"}',
        b'{"messages":[{"role":"assistant","tool_calls":[{"function":"?"}]}],"error":"seen"}',
    ],
)
def test_messages_of_any_shape_are_looked_at(world: World, view: View, detail: bytes) -> None:
    world.deliver(world.trajectory(1, 0, detail=detail))
    run_dir = world.close()
    assert view(run_dir.root)[0] == 0
    made = Made(run_dir.view)
    assert made.text(1).endswith("yes")
    if b"seen" in detail:
        assert "seen" in (made.line(1)["question"], made.item(1)["error"])


def test_numbers_that_are_not_finite_are_null(world: World, view: View) -> None:
    hurt = world.trajectory(1, 0, said=["abc"], reward=float("nan"))
    hurt.logprobs[-1], hurt.logprobs[-2] = float("-inf"), float("nan")
    world.deliver(hurt)
    run_dir = world.close()
    assert view(run_dir.root)[0] == 0
    made = Made(run_dir.view)
    assert made.item(1)["engine"][1:] == [None, None]
    assert made.item(1)["engine"][0] < 0
    assert made.line(1)["reward"] is None
    assert made.item(1)["parts"] == {"exact": None}


def test_many_are_cut_into_files_and_found_again(world: World, view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "LINES", 3)
    monkeypatch.setattr(folder_module, "PAGE_TOKENS", 30)
    for lease in range(1, 9):
        world.deliver(world.trajectory(lease, lease, said=[f"number {lease}"]))
    run_dir = world.close()
    assert view(run_dir.root)[0] == 0
    made = Made(run_dir.view)
    assert len([name for name in made.files if name.startswith("list")]) == 3
    assert len(made.pages) > 2
    for lease in range(1, 9):
        assert made.text(lease).endswith(f"number {lease}")
        assert f"number {lease}" in made.texts[lease - 1]


def test_the_search_looks_into_so_much_and_the_page_says_so(world: World, view: View) -> None:
    world.deliver(world.trajectory(1, 0, said=["z" * 2 * SEARCHED]))
    run_dir = world.close()
    assert view(run_dir.root)[0] == 0
    assert len(Made(run_dir.view).texts[0]) == SEARCHED
    assert f'"searched":{SEARCHED}' in Made(run_dir.view).index


def test_a_run_without_a_trajectory_has_a_page(world: World, view: View) -> None:
    run_dir = world.close()
    code, out, _ = view(run_dir.root)
    assert (code, out) == (0, f"{(run_dir.view / 'index.html').as_uri()}\n")
    assert Made(run_dir.view).lines == []


def test_a_view_replaces_the_one_before_and_opens_at_a_trajectory(full: World, view: View, tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    assert view(full.run_dir.root, "--out", pages)[0] == 0
    (pages / "tokens-99999.js").write_text("of the view before")
    code, out, _ = view(full.run_dir.root, "--out", pages, "--trajectory", 5)
    assert (code, out) == (0, f"{(pages / 'index.html').as_uri()}#trajectory=5\n")
    assert not (pages / "tokens-99999.js").exists()
    assert '"start":5' in (pages / "index.html").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["pages"]


def test_a_trajectory_that_cannot_be_read_is_counted(
    world: World, view: View, caplog: pytest.LogCaptureFixture
) -> None:
    world.deliver(world.trajectory(1, 0, said=["one"]), world.trajectory(2, 0, said=["two"]))
    run_dir = world.close()
    (segment,) = run_dir.journal.glob("*.arrow")
    data = bytearray(segment.read_bytes())
    data[-300:] = bytes(300)
    segment.write_bytes(data)
    assert view(run_dir.root)[0] == 0
    assert [line["lease"] for line in Made(run_dir.view).lines] == [1]
    assert '"unreadable":1' in Made(run_dir.view).index
    assert "lease 2 cannot be read" in caplog.text


# -- mistakes ------------------------------------------------------------------------------------------------------


def mistake(view: View, *argv: object) -> str:
    code, out, err = view(*argv)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("slipstream: ")
    return line


def test_what_is_no_run_is_said_in_one_line(world: World, view: View, tmp_path: Path) -> None:
    assert "name the directory of a run" in mistake(view, tmp_path / "away")
    run_dir = world.close()
    (run_dir.journal / "ledger.log").unlink()
    assert "it has no journal" in mistake(view, run_dir.root)
    assert not run_dir.view.exists()


def test_a_trajectory_that_there_is_not(full: World, world: World, view: View) -> None:
    assert "--trajectory 99: the run has no trajectory of this number; its 8 go from 1 to 8" in mistake(
        view, full.run_dir.root, "--trajectory", 99
    )
    assert "it has none" in mistake(view, world.close().root, "--trajectory", 1)
    assert "--trajectory" in mistake(view, full.run_dir.root, "--trajectory", "first")


def test_a_folder_of_something_else_stays_as_it_is(full: World, view: View, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "index.html").write_text("<h1>mine</h1>")
    assert "is there and is no view" in mistake(view, full.run_dir.root, "--out", tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["index.html"]
    (tmp_path / "file").touch()
    assert "write --out FOLDER" in mistake(view, full.run_dir.root, "--out", tmp_path / "file" / "pages")


def test_a_tokenizer_that_is_gone_can_be_named(full: World, view: View, tmp_path: Path, models: Path) -> None:
    line = mistake(view, full.run_dir.root, "--out", tmp_path / "pages", "--model", tmp_path / "away")
    assert "tokenizer.json" in line
    assert "--model FOLDER" in line
    assert not (tmp_path / "pages").exists()


def test_only_this_script_may_run_in_the_page(made: Made) -> None:
    import base64
    import hashlib

    (script,) = re.findall(r"<script>(.*)</script>", made.index, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', made.index)
    assert f"script-src 'sha256-{digest}' 'strict-dynamic'" in policy
    assert policy.startswith("default-src 'none'")
    assert not re.findall(r'(?:src|href)="(?!data:)', made.index)
    assert os.path.getsize(made.folder / "index.html") < 100_000
