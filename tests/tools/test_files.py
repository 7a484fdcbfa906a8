"""A trajectory's folder: what is in it can be used, and what is outside cannot, whatever a path says."""

import functools
import os
from pathlib import Path

import pytest

from slipstream import Task
from slipstream.errors import UserError
from slipstream.tools import Executor, Files, Toolbox, ToolError, ToolFailed
from slipstream.tools.files import MOST_BYTES


def task(**extra: object) -> Task:
    return Task(id="t", prompt="?", extra=extra)


def executor(*arguments: str) -> Executor:
    return Executor(Toolbox([functools.partial(Files, *arguments)]), 10)


async def test_files_are_written_listed_read_and_gone_afterwards() -> None:
    async with executor().session(task(files={"a/b.txt": "given"})) as session:
        assert (await session.call("read_file", '{"path": "a/b.txt"}')).text == "given"
        assert (await session.call("write_file", '{"path": "new.txt", "text": "é"}')).text == "2 bytes written"
        assert (await session.call("list_files", "{}")).text == "a/b.txt 5\nnew.txt 2"
        assert (await session.call("delete_file", '{"path": "a/b.txt"}')).text == "deleted"
        assert (await session.call("read_file", '{"path": "a/b.txt"}')).error is ToolError.RAISED
        (made,) = session.made.values()
        assert isinstance(made, Files)
        assert made.root.is_dir()
    assert not made.root.exists()


PATHS = ["../secret", "/etc/passwd", "a/../../secret", ".", "", "link", "out/secret", "loop", "nul\\u0000", "x" * 5000]


@pytest.mark.parametrize("path", PATHS)
async def test_nothing_outside_is_reached(path: str, tmp_path: Path) -> None:
    start, outside = tmp_path / "start", tmp_path / "outside"
    start.mkdir()
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (start / "link").symlink_to(outside / "secret")
    (start / "out").symlink_to(outside)
    (start / "loop").symlink_to(start / "loop")
    async with executor(str(start)).session(task()) as session:
        for tool, rest in (("read_file", ""), ("write_file", ', "text": "x"'), ("delete_file", "")):
            result = await session.call(tool, f'{{"path": "{path}"{rest}}}')
            assert result.error is ToolError.RAISED, result
            assert "secret" not in result.text.replace(path, "")
        assert (await session.call("list_files", "{}")).text == "There are none."
    assert [each.name for each in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_text() == "secret"


async def test_what_is_no_file_or_too_much_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    async with executor().session(task(files={"a": "1"})) as session:
        (await session.call("list_files", "{}"))
        (made,) = session.made.values()
        assert isinstance(made, Files)
        os.mkfifo(made.root / "pipe")
        for call in (
            ("read_file", '{"path": "pipe"}'),  # it would wait for ever
            ("write_file", '{"path": "pipe", "text": "x"}'),
            ("write_file", '{"path": "a/b", "text": "x"}'),
            ("write_file", f'{{"path": "b", "text": "{"x" * (MOST_BYTES + 1)}"}}'),
        ):
            assert (await session.call(*call)).error is ToolError.RAISED


async def test_bad_starts() -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        Files("/none/such")
    for files in ([1], {"../a": "x"}):
        async with executor().session(task(files=files)) as session:
            with pytest.raises(ToolFailed, match=r"Files\.setup raised"):
                await session.call("list_files", "{}")
