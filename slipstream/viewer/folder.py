"""The folder of pages: index.html, and data files that it loads as scripts when they are needed, also from file://.

    list-NNNNN.js    lines of the list, LINES a file
    tokens-NNNNN.js  trajectories in full, up to PAGE_TOKENS a file, with the texts of their tokens
    text-NNNNN.js    what the search looks into, LINES a file

Invariant: what a model or a tool wrote is data in these files and never code or markup: JSON without `<` and without
the line separators that JavaScript once took for line ends. A folder is whole or not there.
"""

import base64
import hashlib
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from slipstream.errors import UserError
from slipstream.viewer.pieces import Pieces
from slipstream.viewer.rows import Line, Tokens

LINES = 2_000
PAGE_TOKENS = 40_000
MARK = "<!-- slipstream view -->"  # in the first line of an index.html that may be replaced
_ESCAPES = ((b"<", b"\\u003c"), ("\u2028".encode(), b"\\u2028"), ("\u2029".encode(), b"\\u2029"))


class Manifest(msgspec.Struct):
    """What index.html knows before it has loaded anything."""

    run: str
    trajectories: int
    sampled: int  # tokens
    files: int  # of lines, and
    lines: int  # in each but the last
    recorded: int  # trajectories of which the learner's numbers are there
    replayed: str  # how the learner's numbers were computed again; "" when they are as recorded
    steps: int
    cutoff: int
    unreadable: int
    searched: int  # characters
    scale: int
    start: int | None  # lease


def script_safe(value: Any) -> bytes:
    """JSON that may stand in a script, in a file or in a page."""
    found = msgspec.json.encode(value)
    for character, escape in _ESCAPES:
        found = found.replace(character, escape)
    return found


class Folder:
    """Writes beside `path` and puts the whole in its place at the end. Raises UserError when the disk takes it not."""

    def __init__(self, path: Path, pieces: Pieces) -> None:
        self._path, self.pieces = path, pieces
        self._draft = path.with_name(path.name + ".new")
        self._lines: list[dict[str, Any]] = []
        self._texts: list[str] = []
        self._page: list[Tokens] = []
        self._page_tokens = 0
        self._files = self._pages = 0
        index = path / "index.html"
        if path.exists() and not (index.is_file() and index.read_text(errors="replace").startswith(MARK)):
            raise UserError(f"{path}: is there and is no view; write --out FOLDER with another one")
        shutil.rmtree(self._draft, ignore_errors=True)
        self._draft.mkdir(parents=True)

    def add(self, line: Line, tokens: Tokens, text: str) -> None:
        self._page.append(tokens)
        self._page_tokens += len(tokens.ids)
        self._lines.append(msgspec.to_builtins(line) | {"page": self._pages, "slot": len(self._page) - 1})
        self._texts.append(text)
        if self._page_tokens >= PAGE_TOKENS:
            self._end_page()
        if len(self._lines) >= LINES:
            self._end_lines()

    def finish(self, manifest: Manifest) -> Path:
        """The index.html."""
        self._end_page()
        self._end_lines()
        manifest.files, manifest.lines = self._files, LINES
        (self._draft / "index.html").write_text(page_of(manifest), encoding="utf-8")
        shutil.rmtree(self._path, ignore_errors=True)
        self._draft.rename(self._path)
        return self._path / "index.html"

    def discard(self) -> None:
        shutil.rmtree(self._draft, ignore_errors=True)

    def _end_page(self) -> None:
        if self._page:
            texts = {token: self.pieces.alone(token) for tokens in self._page for token in set(tokens.ids)}
            self._write("tokens", self._pages, {"texts": texts, "items": self._page})
            self._pages += 1
            self._page, self._page_tokens = [], 0

    def _end_lines(self) -> None:
        if self._lines:
            columns = {name: [line[name] for line in self._lines] for name in self._lines[0]}
            self._write("list", self._files, columns)
            self._write("text", self._files, self._texts)
            self._files += 1
            self._lines, self._texts = [], []

    def _write(self, kind: str, number: int, value: Any) -> None:
        said = b'slipstream.take("%s",%d,%s);\n' % (kind.encode(), number, script_safe(value))
        (self._draft / f"{kind}-{number:05d}.js").write_bytes(said)


def page_of(manifest: Manifest) -> str:
    """index.html, with style and script inside: only this very script, and what it loads, may run."""
    page, style, *parts = (
        (resources.files("slipstream.viewer") / "page" / name).read_text(encoding="utf-8")
        for name in ("index.html", "view.css", "tokens.js", "list.js", "view.js")
    )
    script = f"const RUN = {script_safe(manifest).decode()};\n" + "\n".join(parts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    for name, text in (("DIGEST", digest), ("STYLE", style), ("SCRIPT", script)):
        page = page.replace(f"/*{name}*/", text, 1)
    return f"{MARK}\n{page}"
