"""A short run with everything real but the engine: its model, its config, and who it is supervised by."""

import shutil
import subprocess
import sys
from pathlib import Path

from slipstream.config import RunDir
from slipstream.configfile import read_config
from slipstream.learner.publisher import weights_directory

HERE = Path(__file__).parent
TEMPLATE = HERE.parents[1] / "examples" / "calculator" / "chat_template.jinja"

ENVIRONMENT = '''
from slipstream import Environment, reward

@reward
def even(answer: str) -> bool:
    """Chance earns it about half of the time."""
    return len(answer) % 2 == 0

environment = Environment(rewards=[even], system="Say something.")

def tasks(seed):
    for number in range(40):
        yield {"id": f"t{number}", "prompt": f"Say {seed} and {number}."}
'''

CONFIG = """
[run]
steps = {steps}
seed = {seed}
restarts = 100
[model]
path = "{model}"
[environment]
path = "environment.py:environment"
[tasks]
train = "environment.py:tasks"
[rollout]
group = 4
concurrency = 8
max_tokens = 16
max_seconds = 2.0
[engine]
rollouters = 2
max_model_len = 512
[queue]
lease_seconds = 3.0
[staleness]
depth = 1.0
cutoff = 4
[learner]
batch = 3
lr = 1e-3
checkpoint_every = 4
threads = 1
[observe]
wandb = "off"
"""


def save_small_model(folder: Path) -> Path:
    """A Qwen3 of some thousand parameters whose tokens are bytes."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>", "<|pad|>")])
    PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|pad|>", chat_template=TEMPLATE.read_text()
    ).save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=259, max_position_embeddings=512, **shape, **heads)).save_pretrained(folder)
    return folder


def write_config(folder: Path, model: Path, *, steps: int, seed: int) -> Path:
    (folder / "environment.py").write_text(ENVIRONMENT)
    path = folder / "config.toml"
    path.write_text(CONFIG.format(model=model, steps=steps, seed=seed))
    return path


class SmallRun:
    """A run in `folder`, supervised by a process of its own that can be killed and started again."""

    def __init__(self, folder: Path, model: Path, *, steps: int, seed: int) -> None:
        self.steps, self.run_dir, self.output = steps, RunDir(folder / "run"), folder / "output"
        self._config = write_config(folder, model, steps=steps, seed=seed)
        self.start()

    def start(self) -> None:
        with self.output.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "supervise.py"), str(self._config), str(self.run_dir.root)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def said(self) -> str:
        """The end of it."""
        return self.output.read_text()[-3000:]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        shutil.rmtree(weights_directory(read_config(self._config), self.run_dir, 1), ignore_errors=True)
