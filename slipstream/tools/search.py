"""Search over a corpus on this machine, by words (BM25, as the `bm25s` package ranks).

Invariant: the corpus is read and indexed when the environment is loaded, so that what is wrong with it is said then.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from slipstream.errors import UserError
from slipstream.extras import needs
from slipstream.rows import is_dataset, read_rows
from slipstream.tools.tool import Tool, tool

TEXTS = ("*.txt", "*.md", "*.rst")


def search(corpus: str, *, results: int = 3, characters: int = 1000, column: str = "text") -> Tool:
    """The tool `search` over a folder of text files (a file is a document), or a dataset whose rows have `column` and,
    if there is one, a `title`. Shows the first `characters` of the best `results` documents."""
    if results < 1 or characters < 1:
        raise UserError(f"search(results={results}, characters={characters}): write numbers from 1 on")
    documents = list(_documents(corpus, column))
    if not documents:
        raise UserError(f"search({corpus!r}): there are no documents in it ({', '.join(TEXTS)}, or rows)")
    find = _index([f"{title}\n{text}" for title, text in documents])

    @tool
    def search(query: str) -> str:
        """Search the documents by words and show the best.

        Args:
            query: the words to look for
        """
        found = [documents[index] for index in find(query, min(results, len(documents)))]
        if not found:
            return "No document has any of these words."
        return "\n\n".join(f"[{title}]\n{text[:characters]}" for title, text in found)

    return search


def _documents(corpus: str, column: str) -> Iterator[tuple[str, str]]:
    """Title and text of each."""
    folder = Path(corpus)
    files = sorted(file for pattern in TEXTS for file in folder.rglob(pattern)) if folder.is_dir() else []
    for file in files:
        yield str(file.relative_to(folder)), file.read_text("utf-8", "replace")
    if files:
        return
    if not is_dataset(corpus):
        raise UserError(f"search({corpus!r}): there is no such folder, and no .jsonl or .parquet")
    for where, read in read_rows(corpus, "search(...)", 0):
        try:
            row = read()
        except ValueError as error:
            raise UserError(f"search({corpus!r}): {where} {error}") from error
        fields = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
        if not isinstance(fields.get(column), str):
            said = json.dumps(sorted(fields))
            raise UserError(f"search({corpus!r}): {where} has no text in {column!r} (it has {said}); write column=...")
        yield str(fields.get("title", where)), fields[column]


def _index(texts: list[str]) -> Callable[[str, int], list[int]]:
    """What finds, for a query, the places of the best texts, without those that share no word with it."""
    with needs("bm25s", "search", "the tool search"):
        import bm25s

    def words(text: list[str]) -> Any:
        return bm25s.tokenize(text, stopwords="en", return_ids=False, show_progress=False)

    index = bm25s.BM25(backend="numpy")
    index.index(words(texts), show_progress=False)

    def find(query: str, most: int) -> list[int]:
        places, scores = index.retrieve(words([query]), k=most, show_progress=False)
        return [int(place) for place, score in zip(places[0], scores[0], strict=True) if score > 0]

    return find
