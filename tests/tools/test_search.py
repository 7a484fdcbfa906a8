"""Search: the document that has the words comes first, from folders and from datasets."""

import sys
from pathlib import Path

import msgspec
import pytest

from slipstream import Task
from slipstream.errors import UserError
from slipstream.tools import Executor, Tool, Toolbox, search

pytest.importorskip("bm25s")
TEXTS = {
    "tea": "Tea is made of leaves in hot water.",
    "rice": "Rice grows in wet fields, and is boiled.",
    "bread": "Bread is baked of flour, water and yeast.",
}


async def ask(tool: Tool, query: str) -> str:
    async with Executor(Toolbox([tool]), 10).session(Task(id="t", prompt="?")) as session:
        return (await session.call("search", msgspec.json.encode({"query": query}).decode())).text


async def test_a_folder_of_files(tmp_path: Path) -> None:
    for name, text in TEXTS.items():
        (tmp_path / f"{name}.txt").write_text(text)
    tool = search(str(tmp_path), results=1, characters=20)
    assert await ask(tool, "which leaves?") == "[tea.txt]\nTea is made of leave"
    assert await ask(tool, "boiled fields") == "[rice.txt]\nRice grows in wet fi"
    for nothing in ("", "the", "🦆", "motor"):
        assert await ask(tool, nothing) == "No document has any of these words."


async def test_rows_of_a_dataset(tmp_path: Path) -> None:
    path = tmp_path / "shelf.jsonl"
    path.write_bytes(b"\n".join(msgspec.json.encode({"title": n, "body": t}) for n, t in TEXTS.items()))
    assert (await ask(search(str(path), column="body"), "water")).count("[") == 2
    with pytest.raises(UserError, match=r'shelf\.jsonl line 1 has no text in \'text\' \(it has \["body", "title"\]\)'):
        search(str(path))


def test_no_corpus_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        search("/none/such")
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(UserError, match="there are no documents"):
        search(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.txt").write_text("tea")
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(
        UserError, match=r"^the tool search needs the package bm25s: pip install 'slipstream\[search]'$"
    ):
        search(str(tmp_path))
