"""Rows of a dataset, wherever they are: .jsonl, .parquet, a Hugging Face dataset folder, or a function's.

Invariant: each row comes with where it stands (file and line, or file and row), also one that cannot be read.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec

from slipstream.errors import UserError
from slipstream.userfile import last_line_in, load_object

Row = tuple[str, Callable[[], object]]  # where it stands, and how to read it; that may raise ValueError
FILES = (".jsonl", ".parquet")
SAVED, SPLITS = "state.json", "dataset_dict.json"  # of `datasets.save_to_disk`


class Part(msgspec.Struct, frozen=True):
    """One dataset of a mixture."""

    path: str
    weight: float = 1.0


class _State(msgspec.Struct):
    """What `state.json` says that we need."""

    data_files: list[dict[str, str]] = msgspec.field(name="_data_files")
    indices_files: list[dict[str, str]] | None = msgspec.field(name="_indices_files", default=None)


class _Splits(msgspec.Struct):
    splits: list[str]


def parts(spec: str, key: str) -> list[Part]:
    """`a.jsonl * 2 + b.parquet`: what to load, and how often each row of it comes in one pass over all."""
    found: list[Part] = []
    for text in spec.split(" + "):
        path, times, weight = text.rpartition(" * ")
        if not times:
            found.append(Part(text.strip()))
            continue
        try:
            number = float(weight)
        except ValueError:
            number = 0.0
        if not 0 < number < 1e6:
            raise UserError(
                f"{key} = {spec!r}: {weight.strip()!r} is no weight; write a number above 0, 1 for as it is"
            )
        found.append(Part(path.strip(), number))
    return found


def joined(datasets: Iterable[Part]) -> str:
    """The spec of these parts."""
    return " + ".join(each.path if each.weight == 1.0 else f"{each.path} * {each.weight:g}" for each in datasets)


def is_dataset(path: str) -> bool:
    """Whether it says by its name or its contents that it is data, and not a function."""
    return path.endswith(FILES) or Path(path).is_dir()


def read_rows(path: str, key: str, seed: int) -> Iterator[Row]:
    """Raises UserError naming `key` for what keeps all rows from being read."""
    if Path(path).is_dir():
        return _read_folder(Path(path), key)
    if not path.endswith(FILES):
        return _generate(path, key, seed)
    if not Path(path).is_file():
        raise UserError(f"{key} = {path!r}: there is no such file")
    return _read_jsonl(Path(path)) if path.endswith(".jsonl") else _read_parquet(Path(path), key)


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{path.name} line {number}", lambda line=line: _decoded(line)


def _decoded(line: bytes) -> object:
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error


def _read_parquet(path: Path, key: str) -> Iterator[Row]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            yield from _numbered(path, (batch.to_pylist() for batch in file.iter_batches(1024)))
    except (ArrowException, OSError) as error:
        raise UserError(f"{key}: {path} is no Parquet that can be read: {_one_line(error)}") from error


def _read_folder(folder: Path, key: str) -> Iterator[Row]:
    """A folder that `datasets` saved, or one with Parquet files in it, as on the hub."""
    if (folder / SPLITS).is_file():
        splits = msgspec.json.decode((folder / SPLITS).read_bytes(), type=_Splits).splits
        raise UserError(f"{key} = {str(folder)!r} has splits; name one of {', '.join(str(folder / s) for s in splits)}")
    if (folder / SAVED).is_file():
        yield from _read_saved(folder, key)
        return
    files = sorted(folder.rglob("*.parquet"))
    if not files:
        raise UserError(f"{key} = {str(folder)!r}: there is neither a {SAVED} in it nor any .parquet")
    splits = sorted({file.name.split("-")[0].split(".")[0] for file in files})
    if len(splits) > 1:  # train-00000-of-00002.parquet beside test-...: all of them together is nobody's wish
        raise UserError(
            f"{key} = {str(folder)!r} has files of {', '.join(splits)}; name one file or a folder of one kind"
        )
    for file in files:
        yield from _read_parquet(file, key)


def _read_saved(folder: Path, key: str) -> Iterator[Row]:
    import pyarrow

    try:
        state = msgspec.json.decode((folder / SAVED).read_bytes(), type=_State)
        if state.indices_files:
            raise UserError(f"{key} = {str(folder)!r}: its rows are behind indices; save it after flatten_indices()")
        for name in (file["filename"] for file in state.data_files):
            with pyarrow.memory_map(str(folder / name)) as source, pyarrow.ipc.open_stream(source) as stream:
                yield from _numbered(folder / name, (batch.to_pylist() for batch in stream))
    except (pyarrow.ArrowException, OSError, msgspec.DecodeError, KeyError) as error:
        raise UserError(f"{key} = {str(folder)!r} is no dataset that can be read: {_one_line(error)}") from error


def _numbered(path: Path, batches: Iterable[list[dict[str, Any]]]) -> Iterator[Row]:
    for number, row in enumerate(itertools.chain.from_iterable(batches), 1):
        yield f"{path.name} row {number}", lambda row=row: row


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _generate(spec: str, key: str, seed: int) -> Iterator[Row]:
    function = load_object(spec, key)
    if not callable(function):
        raise UserError(f"{key} = {spec!r}: it is no function; write one that takes the seed and yields tasks")
    file, _, name = Path(spec).name.rpartition(":")
    try:
        rows = function(seed)
        if not isinstance(rows, Iterable):
            raise UserError(f"{key} = {spec!r} returned {type(rows).__name__}; yield tasks, or return a list of them")
        for number, row in enumerate(cast("Iterable[object]", rows), 1):
            yield f"{file}:{name} row {number}", lambda row=row: row
    except UserError:
        raise
    except Exception as error:
        line = last_line_in(Path(spec.rpartition(":")[0]), error)
        raise UserError(f"{key} = {spec!r}: line {line} raised {type(error).__name__}: {error}") from error
