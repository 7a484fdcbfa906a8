"""TOML and dotted overrides in, a checked `Config` out; the same keys as help and as docs/configuration.md.

Invariant: a Config from `read_config` has right types, absolute paths and values that agree with each other, and
`write_config` followed by `read_config` gives an equal one. Whatever is wrong is one UserError line that names the key.
"""

import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
import tomli_w
from msgspec import NODEFAULT, inspect
from msgspec.structs import FieldInfo, fields

from slipstream.config import Config, Section
from slipstream.errors import UserError
from slipstream.model_folder import check_model
from slipstream.rows import Part, is_dataset, joined, parts

Values = dict[str, dict[str, Any]]  # section -> key -> value, as in the TOML file

PATHS = ("model.path", "environment.path", "tasks.train", "tasks.heldout", "weights.directory")


class Key(msgspec.Struct, frozen=True):
    """One leaf of the config."""

    dotted: str
    field: FieldInfo

    @property
    def section(self) -> str:
        return self.dotted.partition(".")[0]

    @property
    def name(self) -> str:
        return self.dotted.partition(".")[2]

    @property
    def description(self) -> str:
        return " ".join(arg.description or "" for arg in get_args(self.field.type) if isinstance(arg, msgspec.Meta))

    @property
    def wanted(self) -> str:
        """What to write, in words."""
        return _wanted(inspect.type_info(self.field.type))

    @property
    def is_text(self) -> bool:
        return isinstance(_bare(inspect.type_info(self.field.type)), inspect.StrType)

    def of(self, config: Config) -> str:
        """Its value, as one would write it in TOML."""
        return as_toml(getattr(getattr(config, self.section), self.name))

    @property
    def default(self) -> str:
        """As one would write it in TOML."""
        if self.field.default_factory is not NODEFAULT:
            return as_toml(self.field.default_factory())
        return "required" if self.field.default is NODEFAULT else as_toml(self.field.default)


def keys() -> Iterator[Key]:
    for section in fields(Config):
        for field in fields(section.type):
            yield Key(f"{section.name}.{field.name}", field)


def _bare(kind: inspect.Type) -> inspect.Type:
    return kind.type if isinstance(kind, inspect.Metadata) else kind


def _wanted(kind: inspect.Type) -> str:
    kind = _bare(kind)
    if isinstance(kind, inspect.LiteralType):
        return "one of " + ", ".join(as_toml(value) for value in kind.values)
    if isinstance(kind, inspect.UnionType):
        return " or ".join(_wanted(each) for each in kind.types).replace("one of ", "")
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        words = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
        bounds = ((kind.gt, "above"), (kind.ge, "of at least"), (kind.lt, "under"))
        words += "".join(f" {word} {bound}" for bound, word in bounds if bound is not None)
        return words if kind.multiple_of is None else f"{words} that {kind.multiple_of} divides"
    if isinstance(kind, inspect.TupleType):
        return f"a list of {len(kind.item_types)}, each {_wanted(kind.item_types[0])}"
    if isinstance(kind, inspect.ListType):
        return f"a list, each {_wanted(kind.item_type)}"
    return 'text in quotes ("...")'


def as_toml(value: Any) -> str:
    """On one line, as one would write it."""
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return msgspec.json.encode(value).decode()


# -- reading -------------------------------------------------------------------------------------------------------


def read_config(path: Path, overrides: Sequence[str] = (), *, files: bool = True) -> Config:
    """The config in the TOML file `path`, changed by overrides `key.sub=value`. Raises UserError.

    `files=False` leaves unchecked that the files it names exist: for who reads a run that was made elsewhere.
    """
    values = _parse(path)
    for override in overrides:
        _apply(override, values)
    config = _build(_absolute(values, path.resolve().parent), path)
    _check_values(config)
    if files:
        _check_files(config)
    return config


def _parse(path: Path) -> Values:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"config {str(path)!r} cannot be read: {error.strerror}; name a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"config {str(path)!r} is not TOML: {error}") from error
    sections = [section.name for section in fields(Config)]
    for section, inside in values.items():
        if section not in sections:
            if not isinstance(inside, dict):
                raise UserError(_unknown(section))
            near = difflib.get_close_matches(section, sections, n=1, cutoff=0.5)
            hint = f"did you mean [{near[0]}]?" if near else f"the sections are {', '.join(sections)}"
            raise UserError(f"[{section}] is not a section; {hint}")
        if not isinstance(inside, dict):
            raise UserError(f"{section} = {as_toml(inside)}: it is a section; write [{section}] and its keys below")
    return values


def _apply(override: str, values: Values) -> None:
    dotted, equals, text = override.partition("=")
    dotted, text = dotted.strip(), text.strip()
    if not equals:
        raise UserError(f"{override!r} is no override; write key.sub=value, such as learner.lr=1e-5")
    key = next((key for key in keys() if key.dotted == dotted), None)
    if key is None:
        raise UserError(_unknown(dotted))
    try:
        parsed = tomllib.loads(f"v = {text}")
    except tomllib.TOMLDecodeError:
        parsed = {"v": text}
    if len(parsed) > 1 or (key.is_text and not isinstance(parsed["v"], str)):
        parsed = {"v": text}  # run.name=2025 is a name
    values.setdefault(key.section, {})[key.name] = parsed["v"]


def _unknown(dotted: str) -> str:
    known = [key.dotted for key in keys()]
    leaf = dotted.rpartition(".")[2]
    near = [name for name in known if name.endswith(f".{leaf}")] if leaf else []
    near = difflib.get_close_matches(dotted, near or known, n=1, cutoff=0.0 if near else 0.55)
    hint = f"; did you mean {near[0]}?" if near else "; `slipstream run --help` lists them all"
    return f"{dotted} is not a key{hint}"


def _absolute(values: Values, folder: Path) -> Values:
    """Paths are relative to the config file's folder; FILE.py:NAME keeps its name."""

    def resolve(dotted: str, value: Any) -> Any:
        if dotted not in PATHS or not isinstance(value, str) or not value:
            return value
        if dotted.startswith("tasks."):
            return joined(Part(beside(part.path), part.weight) for part in parts(value, dotted))
        return beside(value)

    def beside(path: str) -> str:
        file, colon, name = path.partition(".py:")
        return os.path.normpath(folder / Path(file).expanduser()) + colon + name

    return {
        section: {name: resolve(f"{section}.{name}", value) for name, value in inside.items()}
        for section, inside in values.items()
    }


def _build(values: Values, path: Path) -> Config:
    known = {key.dotted: key for key in keys()}
    for section, inside in values.items():
        for name in inside:
            if f"{section}.{name}" not in known:
                raise UserError(_unknown(f"{section}.{name}"))
    built: dict[str, Section] = {}
    for section in fields(Config):
        inside: Mapping[str, Any] = values.get(section.name, {})
        made: dict[str, Any] = {}
        for key in known.values():
            if key.section == section.name and key.name in inside:
                made[key.name] = _convert(key, inside[key.name])
            elif key.section == section.name and key.field.required:
                raise UserError(f"{key.dotted} is missing in {path}: {key.description}")
        built[section.name] = section.type(**made)
    return Config(**built)  # pyright: ignore[reportArgumentType]


def _convert(key: Key, value: Any) -> Any:
    try:
        converted = msgspec.convert(value, key.field.type)
    except msgspec.ValidationError as error:
        raise _wrong(key.dotted, value, f"write {key.wanted}") from error
    numbers = converted if isinstance(converted, tuple) else (converted,)
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        raise _wrong(key.dotted, value, f"write {key.wanted}")
    return converted


def _wrong(dotted: str, value: Any, instead: str) -> UserError:
    return UserError(f"{dotted} = {as_toml(value)}: {instead}")


# -- checks across keys --------------------------------------------------------------------------------------------


def _check_values(config: Config) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.run.name):
        raise _wrong("run.name", config.run.name, "it names a folder; use letters, digits, '.', '_' and '-'")
    if config.queue.lease_seconds <= config.rollout.max_seconds:
        instead = f"write more than rollout.max_seconds = {config.rollout.max_seconds}, or leases return before time"
        raise _wrong("queue.lease_seconds", config.queue.lease_seconds, instead)
    if config.rollout.max_tokens >= config.engine.max_model_len:
        instead = f"write less than engine.max_model_len = {config.engine.max_model_len}, or no prompt fits before them"
        raise _wrong("rollout.max_tokens", config.rollout.max_tokens, instead)
    if config.rollout.group_min == 1 or config.rollout.group_min > config.rollout.group:
        instead = f"write 0, or from 2 to rollout.group = {config.rollout.group}: a group of one has no baseline"
        raise _wrong("rollout.group_min", config.rollout.group_min, instead)
    if config.staleness.auto_min > config.staleness.auto_max:
        instead = f"write at least staleness.auto_min = {config.staleness.auto_min}"
        raise _wrong("staleness.auto_max", config.staleness.auto_max, instead)
    if not all(0 <= beta < 1 for beta in config.learner.betas):
        raise _wrong("learner.betas", config.learner.betas, "write two numbers from 0 up to, not including, 1")
    if {"tis", "tis_sequence"} <= set(config.correction.presets):
        raise _wrong("correction.presets", config.correction.presets, "tis and tis_sequence both truncate; keep one")
    if config.advantage.overlong_buffer > config.rollout.max_tokens:
        instead = f"write at most rollout.max_tokens = {config.rollout.max_tokens}"
        raise _wrong("advantage.overlong_buffer", config.advantage.overlong_buffer, instead)
    if config.learner.proximal == "interpolate" and config.loss.name == "reinforce":
        raise _wrong("learner.proximal", "interpolate", "loss.name = 'reinforce' has no ratio; write recompute")
    weighted = config.learner.proximal != "bypass" or config.loss.name == "reinforce"
    if config.learner.ess_lr and not (weighted and {"tis", "tis_sequence"} & set(config.correction.presets)):
        instead = "there are no weights to take it from; add tis to correction.presets, and do not bypass"
        raise _wrong("learner.ess_lr", True, instead)
    if config.queue.listen and not re.fullmatch(
        r"tcp://[^\s:/]+:(\d+|\*)|tcp://\[.+\]:(\d+|\*)|ipc://.+", config.queue.listen
    ):
        raise _wrong(
            "queue.listen", config.queue.listen, "write tcp://ADDRESS:PORT or ipc://FILE, or '' for the default"
        )


def _check_files(config: Config) -> None:
    check_model(config)
    _check_spec("environment.path", config.environment.path, data=False)
    for dotted, spec in (("tasks.train", config.tasks.train), ("tasks.heldout", config.tasks.heldout)):
        for part in parts(spec, dotted) if spec else []:
            _check_spec(dotted, part.path, data=True)


def _check_spec(dotted: str, spec: str, *, data: bool) -> None:
    """FILE.py:NAME, or data where `data`."""
    file, colon, name = spec.rpartition(":")
    if data and is_dataset(spec):
        file = spec
    elif not (colon and name.isidentifier() and file.endswith(".py")):
        kinds = " or the name of a .jsonl file, a .parquet file or a dataset folder" if data else ""
        raise _wrong(dotted, spec, f"write FILE.py:NAME{kinds}")
    if not (Path(file).is_file() or (data and Path(file).is_dir())):
        raise _wrong(dotted, spec, f"there is no file {file}; paths are relative to the config file's folder")


# -- writing -------------------------------------------------------------------------------------------------------


def write_config(config: Config, path: Path) -> None:
    """All keys, defaults too. Written whole, then renamed: who reads it never sees half of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(tomli_w.dumps(msgspec.to_builtins(config)), encoding="utf-8")
    draft.replace(path)


def differing(one: Config, other: Config) -> list[str]:
    """Dotted names of the keys whose values differ."""
    a: Values = msgspec.to_builtins(one)
    b: Values = msgspec.to_builtins(other)
    return [key.dotted for key in keys() if a[key.section][key.name] != b[key.section][key.name]]


def field_help() -> str:
    """All keys with their defaults, for `--help`."""
    lines = ["config keys (in CONFIG as [section] and key = value, here as section.key=value):"]
    lines += [f"  {key.dotted} ({key.default})\n      {key.description}" for key in keys()]
    return "\n".join(lines)


def configuration_page() -> str:
    """docs/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "Generated from `slipstream/config.py` by `make docs`; do not edit. A config is a TOML file; any key can be",
        "changed for one run on the command line:",
        "",
        "    slipstream run CONFIG learner.lr=1e-5 observe.wandb=off 'correction.presets=[\"tis\"]'",
        "",
        "Paths are relative to the config file's folder, on the command line too.",
    ]
    section = ""
    for key in keys():
        if key.section != section:
            section = key.section
            lines += ["", f"## [{section}]", "", "| key | default | takes | |", "|---|---|---|---|"]
        lines.append(f"| `{key.name}` | `{key.default}` | {key.wanted} | {key.description} |")
    return "\n".join(lines) + "\n"
