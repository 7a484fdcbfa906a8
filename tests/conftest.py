"""A model folder, an environment and a config as far as the door looks into them."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEMPLATE = (ROOT / "examples" / "calculator" / "chat_template.jinja").read_text()
# Forgets what was said before the last message: no stream of tokens can grow under it.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last else '...' }}<|im_end|>\n{% endfor %}"
)
ENVIRONMENT = """
from slipstream import Environment, reward, tool

@tool
def double(number: int) -> int:
    '''Twice the number.

    Args:
        number: What to double.
    '''
    return 2 * number

@reward
def right(trajectory, task) -> float:
    return 1.0

environment = Environment(tools=[double], rewards=[right])

def many(seed):
    return [{"prompt": f"{seed} + {n}?"} for n in range(3)]
"""


def save_model(folder: Path, template: str) -> None:
    """A model folder as far as the door looks into it: a byte-level tokenizer and a template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>", "<|pad|>")])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|pad|>", chat_template=template
    )
    wrapped.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 4096}')
    (folder / "model.safetensors").touch()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "stable", TEMPLATE)
    save_model(folder / "forgetful", FORGETFUL)
    save_model(folder / "silent", "")
    return folder


@pytest.fixture
def config(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "environment.py").write_text(ENVIRONMENT)
    path = tmp_path / "config.toml"
    path.write_text(
        f'[run]\nname = "small"\n[model]\npath = "{models}/stable"\n'
        '[environment]\npath = "environment.py:environment"\n[tasks]\ntrain = "environment.py:many"\n'
    )
    return path
