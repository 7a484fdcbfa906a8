"""The config file: everything right goes in and out unchanged; everything wrong is one line that says what to write."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.config import Config
from slipstream.configfile import configuration_page, differing, field_help, keys, read_config, write_config
from slipstream.errors import UserError

ROOT = Path(__file__).parents[1]
MINIMAL = """
[model]
path = "model"
[environment]
path = "environment.py:environment"
[tasks]
train = "train.jsonl"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "environment.py").write_text("environment = None\n")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1 + 1?"}\n')
    (tmp_path / "config.toml").write_text(MINIMAL)
    return tmp_path


def said(folder: Path, text: str, *overrides: str) -> str:
    """The one line with which a config is refused."""
    (folder / "config.toml").write_text(text)
    with pytest.raises(UserError) as refused:
        read_config(folder / "config.toml", overrides)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_paths_are_absolute_and_keep_their_names(folder: Path) -> None:
    (folder / "config.toml").write_text(MINIMAL.replace('"model"', f'"../{folder.name}/model"'))
    config = read_config(folder / "config.toml", ["tasks.heldout=environment.py:tasks", "weights.directory=shared"])
    assert config.model.path == str(folder / "model")
    assert config.environment.path == f"{folder}/environment.py:environment"
    assert config.tasks.train == str(folder / "train.jsonl")
    assert config.tasks.heldout == f"{folder}/environment.py:tasks"
    assert config.weights.directory == str(folder / "shared")
    unset = read_config(folder / "config.toml")
    assert (unset.tasks.heldout, unset.weights.directory) == ("", "")


def test_overrides(folder: Path) -> None:
    overrides = [
        "learner.lr=1e-5",
        "learner.lr=2e-5",
        "run.name=2025",
        "observe.project=a = b",
        "observe.wandb=off",
        'loss.name="gspo"',
        "advantage.population=true",
        "staleness.depth=1",
        "correction.presets=['veto', 'k3']",
        "learner.betas=[0.8, 0.9]",
        "tasks.heldout=",
    ]
    config = read_config(folder / "config.toml", overrides)
    assert config.learner.lr == 2e-5
    assert config.run.name == "2025"
    assert config.observe.project == "a = b"
    assert config.observe.wandb == "off"
    assert config.loss.name == "gspo"
    assert config.advantage.population is True
    assert config.staleness.depth == 1.0
    assert config.correction.presets == ["veto", "k3"]
    assert config.learner.betas == (0.8, 0.9)


@pytest.mark.parametrize(
    ("more", "override", "says"),
    [
        ("", "loss.nam=ppo", "loss.nam is not a key; did you mean loss.name?"),
        ("", "los.name=ppo", "los.name is not a key; did you mean loss.name?"),
        ("", "learner.temperature=1", "learner.temperature is not a key; did you mean rollout.temperature?"),
        ("", "lr=1", "lr is not a key; did you mean learner.lr?"),
        ("", "zzz=1", "zzz is not a key; `slipstream run --help` lists them all"),
        ("", "=1", " is not a key; `slipstream run --help` lists them all"),
        ("", "learner.lr", "'learner.lr' is no override; write key.sub=value, such as learner.lr=1e-5"),
        ("[loss]\nnam = 'ppo'", None, "loss.nam is not a key; did you mean loss.name?"),
        ("[los]\nname = 'ppo'", None, "[los] is not a section; did you mean [loss]?"),
        ("[rollout.group]\nsize = 3", None, 'rollout.group = {"size":3}: write a whole number of at least 2'),
        ("", "learner.lr=fast", 'learner.lr = "fast": write a number above 0'),
        ("", "learner.lr=0", "learner.lr = 0: write a number above 0"),
        ("", "learner.lr=nan", "learner.lr = nan: write a number above 0"),
        ("", "learner.lr=inf", "learner.lr = inf: write a number above 0"),
        ("", "rollout.group=2.5", "rollout.group = 2.5: write a whole number of at least 2"),
        ("", "rollout.group=true", "rollout.group = true: write a whole number of at least 2"),
        ("", "run.seed=-1", "run.seed = -1: write a whole number of at least 0 under 4294967296"),
        ("", "engine.block_size=40", "engine.block_size = 40: write a whole number of at least 32 that 32 divides"),
        ("", "advantage.population=yes", 'advantage.population = "yes": write true or false'),
        ("", "engine.start=forked", 'engine.start = "forked": write one of "auto", "fork", "spawn"'),
        ("", "learner.betas=[0.9]", "learner.betas = [0.9]: write a list of 2, each a number"),
        ("", "learner.betas=[0.9, 1]", "learner.betas = [0.9, 1.0]: write two numbers from 0 up to, not including, 1"),
        ("", "correction.presets=tis", 'correction.presets = "tis": write a list, each one of '),
        ("", "correction.presets=['tis', 'tis_sequence']", "tis and tis_sequence both truncate; keep one"),
        ("", "rollout.group_min=1", "rollout.group_min = 1: write 0, or from 2 to rollout.group = 8"),
        ("", "queue.lease_seconds=60", "queue.lease_seconds = 60.0: write more than rollout.max_seconds = 120.0"),
        ("", "rollout.max_tokens=2048", "rollout.max_tokens = 2048: write less than engine.max_model_len = 2048"),
        ("", "run.name=../up", 'run.name = "../up": it names a folder'),
        ("", "queue.listen=localhost", 'queue.listen = "localhost": write tcp://ADDRESS:PORT'),
        ("", "model.path=away", "there is no config.json; name a Hugging Face model folder"),
        ("", "environment.path=environment.py", "write FILE.py:NAME"),
        ("", "environment.path=away.py:it", "there is no file"),
        ("", "tasks.train=train.csv", "write FILE.py:NAME or the name of a .jsonl file"),
        ("", "tasks.heldout=away.jsonl", "there is no file"),
        ("[learner", None, "is not TOML: "),
    ],
)
def test_wrong_input_is_one_line_that_says_what_to_write(
    folder: Path, more: str, override: str | None, says: str
) -> None:
    assert says in said(folder, MINIMAL + more, *([] if override is None else [override]))


def test_top_level_mistakes(folder: Path) -> None:
    assert said(folder, "lr = 1\n" + MINIMAL) == "lr is not a key; did you mean learner.lr?"
    assert said(folder, "learner = 1\n" + MINIMAL).startswith("learner = 1: it is a section; write [learner]")
    assert said(folder, "").startswith("model.path is missing in ")
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_config(folder / "away.toml")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_config(folder)
    (folder / "config.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is not TOML"):
        read_config(folder / "config.toml")


def test_a_run_made_elsewhere_is_read_without_its_files(folder: Path) -> None:
    text = MINIMAL.replace('"model"', '"/away/model"')
    assert "config.json" in said(folder, text)
    assert read_config(folder / "config.toml", files=False).model.path == "/away/model"


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any value that a key takes."""
    kind = kind.type if isinstance(kind, msgspec.inspect.Metadata) else kind
    match kind:
        case msgspec.inspect.LiteralType():
            return st.sampled_from(kind.values)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.IntType():
            step = kind.multiple_of or 1
            return st.integers((kind.ge or 0) // step, ((kind.lt or 2**40) - 1) // step).map(lambda n: n * step)
        case msgspec.inspect.FloatType():
            low = 1e-12 if kind.ge is None and kind.gt is None else max(kind.ge or 0, kind.gt or 0)
            return st.floats(
                low,
                1e12 if kind.lt is None else kind.lt * (1 - 1e-9),
                exclude_min=kind.gt is not None,
                allow_subnormal=False,
            )
        case msgspec.inspect.StrType():
            return st.text(st.characters(codec="utf-8"), max_size=20)
        case msgspec.inspect.TupleType():
            return st.tuples(st.floats(0, 0.999), st.floats(0, 0.999))
        case msgspec.inspect.ListType():
            return st.lists(st.sampled_from(["icepop", "veto", "k3"]), max_size=3)
        case msgspec.inspect.UnionType():
            return st.one_of(*map(values_of, kind.types))
        case _:
            raise AssertionError(kind)


FIXED = {
    "model.path",
    "environment.path",
    "tasks.train",
    "tasks.heldout",
    "weights.directory",
    "queue.listen",
    "run.name",
    "staleness.auto_max",
    "staleness.auto_min",
}
FREE = [key for key in keys() if key.dotted not in FIXED]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_what_is_written_is_read_back_equal(folder: Path, data: st.DataObject) -> None:
    config = msgspec.to_builtins(read_config(folder / "config.toml"))
    for key in data.draw(st.lists(st.sampled_from(FREE), max_size=10)):
        config[key.section][key.name] = data.draw(values_of(msgspec.inspect.type_info(key.field.type)), key.dotted)
    config["queue"]["lease_seconds"] = config["rollout"]["max_seconds"] + 1
    config["engine"]["max_model_len"] = config["rollout"]["max_tokens"] + 16
    # What must agree with each other, as `test_wrong_input_is_one_line...` shows.
    config["advantage"]["overlong_buffer"] = min(
        config["advantage"]["overlong_buffer"], config["rollout"]["max_tokens"]
    )
    config["rollout"]["group_min"] = min(config["rollout"]["group_min"] & ~1, config["rollout"]["group"])
    config["learner"] |= {"ess_lr": False, "proximal": "recompute"}
    changed = msgspec.convert(config, Config)
    (folder / "run").mkdir(exist_ok=True)
    write_config(changed, folder / "run" / "config.toml")
    again = read_config(folder / "run" / "config.toml")
    assert again == changed
    assert differing(again, changed) == []


def test_differing_names_the_keys(folder: Path) -> None:
    one = read_config(folder / "config.toml")
    other = read_config(folder / "config.toml", ["learner.lr=1", "run.seed=4"])
    assert differing(one, other) == ["run.seed", "learner.lr"]


def test_every_key_says_when_to_turn_it_and_there_are_fewer_than_100() -> None:
    assert 0 < len(list(keys())) < 100
    for key in keys():
        assert key.description.endswith("."), key.dotted
        assert f"  {key.dotted} ({key.default})\n" in field_help()


def test_the_configuration_page_is_current() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == configuration_page(), "run `make docs`"


def test_the_presets_of_the_config_are_those_of_the_learner() -> None:
    from slipstream.learner.corrections import PRESETS

    presets = next(key for key in keys() if key.dotted == "correction.presets")
    assert sorted(re.findall(r'"(\w+)"', presets.wanted)) == sorted(PRESETS)


def test_the_demo_config_is_short_and_right() -> None:
    path = ROOT / "examples" / "calculator" / "config.toml"
    assert len(path.read_text().splitlines()) < 40
    read_config(path, files=False)
