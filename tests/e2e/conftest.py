"""A whole run with the real engine, on an untrained model and a reward that chance can earn."""

import sys
from pathlib import Path

import pytest

CALCULATOR = Path(__file__).parents[2] / "examples" / "calculator"

ENVIRONMENT = '''
from slipstream import Environment, reward, tool

@tool
def look(at: str) -> str:
    """Look at something."""
    return "nothing"

@reward
def even(answer: str) -> bool:
    """Chance earns it about half of the time."""
    return len(answer) % 2 == 0

environment = Environment(tools=[look], rewards=[even], system="Say something.")

def tasks(seed):
    for number in range(50):
        yield {"id": f"t{number}", "prompt": f"Say {seed} and {number}."}
'''

CONFIG = """
[run]
steps = {steps}
[model]
path = "{model}"
[environment]
path = "environment.py:environment"
[tasks]
train = "environment.py:tasks"
heldout = "environment.py:tasks"
heldout_limit = 8
[rollout]
group = 4
concurrency = 8
max_tokens = 24
[engine]
max_model_len = 256
kv_cache_mb = 64
[staleness]
depth = {depth}
[learner]
batch = 2
lr = 1e-4
threads = 1
[observe]
wandb = "{wandb}"
"""


@pytest.fixture(scope="session")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sys.path.insert(0, str(CALCULATOR))
    from start_model import save_untrained

    folder = tmp_path_factory.mktemp("model") / "untrained"
    save_untrained(folder)
    return folder


@pytest.fixture
def config(tmp_path: Path, untrained: Path):
    def write(**values: object) -> Path:
        (tmp_path / "environment.py").write_text(ENVIRONMENT)
        path = tmp_path / "config.toml"
        path.write_text(CONFIG.format(model=untrained, **values))
        return path

    return write
