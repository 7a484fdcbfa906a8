"""The pages as files and over HTTP: they load nothing, let nothing in, and what a run says stays text."""

import base64
import hashlib
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from viewer_world import World

from slipstream import cli

HOSTILE = "<img src=x onerror=alert(1)>&quot;"


def test_the_page_is_whole_in_one_file(full: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(full.run_dir.root)]) == 0
    path = full.run_dir.report
    assert capsys.readouterr().out == f"{path.as_uri()}\n"
    page = path.read_text()
    assert not re.search(r"https?://|url\(|@import|<link (?!rel=\"icon\" href=\"data:)", page)
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert (len(script), f"'sha256-{digest}'" in page) == (1, True)
    assert "What to set" in page
    assert not list(full.run_dir.root.glob("*.draft"))


def test_what_a_run_says_stays_text(models: Path, tmp_path: Path) -> None:
    world = World(tmp_path / HOSTILE, models / "stable")
    world.deliver(world.trajectory(1, 0, said=[HOSTILE], asked=HOSTILE, error=HOSTILE))
    run = world.close()
    assert cli.main(["report", str(run.root)]) == 0
    assert "<img" not in run.report.read_text()
    assert "&lt;img src=x" in run.report.read_text()


def test_mistakes_are_one_line(full: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full.run_dir.report.mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        for argv, says in (
            (["report", str(tmp_path / "none")], "none"),
            (["watch", str(tmp_path / "none")], "none"),
            (["watch", str(full.run_dir.root), "--port", "70000"], "write 0 to 65535"),
            (["watch", str(full.run_dir.root), "--port", port], f"--port {port}: Address already in use"),
            (["report", str(full.run_dir.root)], "report.html: cannot be written: Is a directory"),
        ):
            assert cli.main(argv) == 2
            said = capsys.readouterr().err
            assert says in said
            assert said.count("\n") == 1


@contextmanager
def watched(run: Path) -> Iterator[str]:
    """The address that a real `slipstream watch` prints."""
    command = [sys.executable, "-m", "slipstream", "watch", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def get(url: str, **headers: str) -> tuple[int, str, str]:
    """Status, text, ETag."""
    request = urllib.request.Request(url, headers={name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode(), answer.headers.get("ETag", "")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), ""


def test_the_live_page_is_for_who_has_the_token(full: World) -> None:
    with watched(full.run_dir.root) as url:
        address, token = url.split("?token=")
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
        for wrong in (
            address,
            f"{address}?token=",
            f"{address}?token={token[:-1]}",
            f"{address}body?token=é".replace("é", "%C3%A9"),
        ):
            status, said, _ = get(wrong)
            assert (status, "full" in said) == (403, False)
        assert get(url)[0] == 200
        status, body, tag = get(f"{address}body?token={token}")
        assert status == 200
        assert 'id="reward"' in body
        assert "no process of the run is there" in body
        assert get(f"{address}body?token={token}", If_None_Match=tag)[0] == 304
