"""Tokens' texts: joined they are the stream's, and a character of several tokens is whole."""

from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slipstream.errors import UserError
from slipstream.viewer.pieces import LONGEST, Pieces

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@lru_cache
def byte_level(folder: Path) -> tuple[Tokenizer, Pieces]:
    """A letter of ASCII is a token; any other character is two to four. The first two bytes of 日 are one token."""
    vocabulary = {letter: number for number, letter in enumerate(ALPHABET)} | {"æĹ": len(ALPHABET)}
    return saved(Tokenizer(models.BPE(vocab=vocabulary, merges=[("æ", "Ĺ")])), decoders.ByteLevel(), folder)


def saved(core: Tokenizer, decoder: decoders.Decoder, folder: Path) -> tuple[Tokenizer, Pieces]:
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoder
    core.save(str(folder / "tokenizer.json"))
    return core, Pieces(str(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("byte-level")


def parts(pieces: Pieces, ids: list[int]) -> list[str]:
    found = [pieces.alone(token) for token in ids]
    for cluster in pieces.clusters(ids):
        found[cluster.start : cluster.start + cluster.size] = [cluster.text, *[""] * (cluster.size - 1)]
    return found


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_joined_they_are_the_text(folder: Path, text: str) -> None:
    core, pieces = byte_level(folder)
    ids = core.encode(text).ids
    assert "".join(parts(pieces, ids)) == text
    for cluster in pieces.clusters(ids):
        assert 2 <= cluster.size <= 4
        assert len(cluster.text) == 1


@given(ids=st.lists(st.integers(0, len(ALPHABET) + 3), max_size=40))
def test_bytes_that_are_no_character_cost_nothing_else(folder: Path, ids: list[int]) -> None:
    """Also numbers that the tokenizer has not: each token is there once, and what is a character is one."""
    core, pieces = byte_level(folder)
    clusters = pieces.clusters(ids)
    ends = [0, *(cluster.start + cluster.size for cluster in clusters)]
    assert all(cluster.start >= end for cluster, end in zip(clusters, ends, strict=False))
    assert all(2 <= cluster.size <= LONGEST for cluster in clusters)
    whole = core.decode(ids, skip_special_tokens=False).replace("\ufffd", "")
    assert "".join(parts(pieces, ids)).replace("\ufffd", "") == whole


def test_a_token_may_share_its_bytes_with_two_characters(folder: Path) -> None:
    core, pieces = byte_level(folder)
    ids = core.encode("a日é🦀b").ids
    assert [part for part in parts(pieces, ids) if part] == ["a", "日", "é", "🦀", "b"]
    assert len(ids) == 1 + 2 + 2 + 4 + 1  # 日 is its first two bytes, and the third


def test_spaces_stay_where_a_decoder_drops_the_first(tmp_path: Path) -> None:
    """As models of the Llama family write them."""
    words = {word: number for number, word in enumerate(["<unk>", "▁the", "▁a", "cat", "a", "▁"])}
    core = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Metaspace()
    core.save(str(tmp_path / "tokenizer.json"))
    pieces = Pieces(str(tmp_path))
    assert [pieces.alone(number) for number in (1, 3, 2)] == [" the", "cat", " a"]


def test_what_is_no_tokenizer_is_said_with_what_to_write(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read.*--model FOLDER"):
        Pieces(str(tmp_path))
