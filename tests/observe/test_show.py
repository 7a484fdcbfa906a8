"""`show`: every token once, and what was not sampled is grey."""

import io

import pyarrow as pa
import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slipstream.observe import show as module


@pytest.fixture
def model(tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.save(str(tmp_path / "tokenizer.json"))
    return core, str(tmp_path)


def test_sampled_tokens_are_coloured_and_the_rest_is_grey(model, monkeypatch: pytest.MonkeyPatch) -> None:
    core, folder = model
    said, given = core.encode("café [b]").ids, core.encode("what?").ids  # é is two tokens here
    trajectory = pa.RecordBatch.from_pylist(
        [
            {
                "lease": 7,
                "group": 1,
                "task": "t",
                "outcome": "finished",
                "reward": 1.0,
                "turns": 1,
                "tool_calls": 0,
                "token_ids": [*given, *said, *given],
                "sampled": [False] * len(given) + [True] * len(said) + [False] * len(given),
                "version_runs": [{"length": 1, "version": -1}, {"length": 1, "version": 3}],
            }
        ]
    )
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=200, highlight=False)
    monkeypatch.setattr(module, "Console", lambda **_: console)
    module.show(trajectory, folder)
    text = out.getvalue()
    grey, colour = (console.get_style(style).render("X", color_system=console._color_system).partition("X")[0]
                    for style in (module.GREY, module.COLOUR))  # fmt: skip
    assert f"{grey}what?" in text
    assert f"{colour}café [b]" in text
    assert text.count("what?") == 2
    assert "sampled by versions [3]" in text
    assert f"{len(said)} of {len(said) + 2 * len(given)} tokens sampled" in text
