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

async def several(task, chat):
    """Conversations of every kind: over HTTP, a fork of it, the task's own, a fork of that."""
    from openai import AsyncOpenAI

    endpoint = await chat.serve()
    async with AsyncOpenAI(base_url=endpoint.openai, api_key=endpoint.key) as client:
        messages = [{"role": "user", "content": "Say it shortly."}]
        for _ in range(2):
            said = await client.chat.completions.create(model="any", messages=messages, max_tokens=4)
        messages.append({"role": "assistant", "content": said.choices[0].message.content})
        messages.append({"role": "user", "content": "Again."})
        await client.chat.completions.create(model="any", messages=messages, max_tokens=4)
    other = chat.branch()
    await chat.say()
    if chat.room and other.room:
        await other.say()

led = Environment(tools=[look], rewards=[even], system="Say something.", agent=several)

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
path = "environment.py:{environment}"
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
        path.write_text(CONFIG.format(**{"model": untrained, "environment": "environment", **values}))
        return path

    return write
