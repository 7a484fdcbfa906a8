"""Each token's own text, such that the texts of a stream's tokens, joined, read as the stream does.

Invariant: a character made of several tokens comes out whole, as a cluster: its text stands with the first of them.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from slipstream.errors import UserError

BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character
LONGEST = 6  # tokens in which a character must have ended: UTF-8 has at most four bytes, and both ends may be shared


class Cluster(msgspec.Struct, array_like=True, frozen=True):
    """`size` tokens from `start` on that have only a text together."""

    start: int
    size: int
    text: str


class Pieces:
    """Tokens' texts, by one model's tokenizer. Each is decoded behind another token: many decoders treat the first
    of a stream in a way of its own (they drop its space)."""

    def __init__(self, model: str) -> None:
        """Raises UserError."""
        from tokenizers import Tokenizer

        path = Path(model) / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower one
            raise UserError(
                f"model.path = {model!r}: its tokenizer.json cannot be read ({error}); write --model FOLDER"
            ) from error
        self._anchor = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._before = len(self._decode(self._anchor))
        self._alone: dict[int, str] = {}

    def text(self, ids: Sequence[int]) -> str:
        return self._decode([*self._anchor, *ids])[self._before :]

    def alone(self, token: int) -> str:
        found = self._alone.get(token)
        if found is None:
            found = self._alone[token] = self.text([token])
        return found

    def clusters(self, ids: Sequence[int]) -> list[Cluster]:
        """Those tokens of a stream that have no text of their own; all others have `alone`."""
        broken = {token for token in set(ids) if BROKEN in self.alone(token)}
        if not broken:
            return []
        found: list[Cluster] = []
        at = 0
        while at < len(ids):
            if ids[at] not in broken:
                at += 1
                continue
            for size in range(2, min(LONGEST, len(ids) - at) + 1):
                text = self.text(ids[at : at + size])
                if BROKEN not in text:
                    found.append(Cluster(at, size, text))
                    at += size
                    break
            else:
                at += 1  # bytes that are no character
        return found

    def _decode(self, ids: Sequence[int]) -> str:
        try:
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)
        except OverflowError:  # a number that no tokenizer has
            return ""
