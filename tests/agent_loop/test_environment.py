import re
from pathlib import Path
from typing import Any

import pytest

from slipstream import AgentLoop, Environment, Task, tool
from slipstream.agent_loop.environment import load_environment
from slipstream.errors import UserError
from slipstream.rewards import exact_match
from slipstream.task import load_tasks


@tool
def echo(text: str) -> str:
    """Say it again."""
    return text


def plain(text: str) -> str:
    """No tool."""
    return text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"rewards": []}, "at least one reward"),
        ({"rewards": [plain]}, "@reward"),
        ({"rewards": [exact_match, exact_match]}, "one name"),
        ({"rewards": [exact_match], "tools": [plain]}, "@tool"),
        ({"rewards": [exact_match], "tools": [echo, echo]}, "two tools are named 'echo'"),
    ],
)
def test_refused(arguments, says):
    with pytest.raises(UserError, match=says):
        Environment(**arguments)


def test_the_system_prompt_stands_first_unless_the_task_has_its_own():
    environment = Environment(rewards=[exact_match], system="Be brief.")
    system, user = environment.first_messages(Task(id="t", prompt="Hi."))
    assert (system, user) == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."})
    own = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "Hi."}]
    assert environment.first_messages(Task(id="t", prompt=own)) == own


SOURCE = """
from slipstream import Environment
from slipstream.rewards import exact_match
from slipstream.agent_loop.environment import Environment as Same
import neighbour
environment = Environment(rewards=[exact_match], system=neighbour.SYSTEM)
other = 3
"""


def test_loading(tmp_path):
    (tmp_path / "neighbour.py").write_text("SYSTEM = 'Be brief.'")
    (tmp_path / "mine.py").write_text(SOURCE)
    environment = load_environment("mine.py:environment", tmp_path)
    assert environment.system == "Be brief."
    assert load_environment(f"{tmp_path}/mine.py:environment") is environment
    with pytest.raises(UserError, match=r"has no 'enviroment'; did you mean environment"):
        load_environment("mine.py:enviroment", tmp_path)
    with pytest.raises(UserError, match="is of type int"):
        load_environment("mine.py:other", tmp_path)


@pytest.mark.parametrize(
    ("spec", "source", "says"),
    [
        ("mine.py", "", r"write it as FILE\.py:NAME"),
        ("nowhere.py:environment", "", r"there is no file .*nowhere\.py"),
        ("mine.py:environment", "x = 1\nraise KeyError('oops')\n", r"line 2 raised KeyError: 'oops'"),
        ("mine.py:environment", "x = 1\n\nx = = 2\n", r"line 3 raised SyntaxError"),
        ("mine.py:environment", "from slipstream import tool\n@tool\ndef f(): pass\n", r"tool f has no docstring"),
    ],
)
def test_loading_errors_name_the_key_and_the_line(tmp_path, spec, source, says):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(UserError, match=says) as refused:
        load_environment(spec, tmp_path)
    assert "environment.path" in str(refused.value) or "tool f" in str(refused.value)


async def test_the_page_on_agents_does_what_it_says(tmp_path, renderer, script, limits):
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    world, notes, others, agent, branching, served = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "search(" in others
    exec(others.partition("\n\n")[0])  # what it imports; corpus and server are nobody's here
    (row,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (tmp_path / "world.py").write_text(world)
    (tmp_path / "shelf.jsonl").write_text(row)
    environment = load_environment("world.py:environment", tmp_path)
    (task,) = load_tasks(str(tmp_path / "shelf.jsonl"), "tasks.train", seed=0)
    names: dict[str, Any] = {}
    exec(notes, names)
    exec(agent, names)
    led = Environment(tools=[*environment.tools, names["Notes"]], rewards=environment.rewards, agent=names["two_tries"])
    note = '<tool_call>{"name": "note", "arguments": {"line": "tea"}}</tool_call>'
    sampler = script('<tool_call>{"name": "stock", "arguments": {"item": "tea"}}</tool_call>' + note, "3")
    loop = AgentLoop(led, renderer, sampler, limits)
    trajectory = await loop.run(lease=0, group=0, task=task, attempt=0, seed=0, t_leased=0.0)
    assert (trajectory.turns, trajectory.tool_calls, trajectory.tool_errors) == (2, 2, 0)
    assert trajectory.reward_parts == {"right": 1.0, "brief": 1.0}
    assert trajectory.reward == pytest.approx(1.1)
    exec(branching + served, names)
    for name, replies in {"frugal": ["3"], "two_heads": ["", "3"], "black_box": ["3"]}.items():
        led = Environment(tools=environment.tools, rewards=environment.rewards, agent=names[name])
        loop = AgentLoop(led, renderer, script(*replies), limits)
        trajectory = await loop.run(lease=0, group=0, task=task, attempt=0, seed=0, t_leased=0.0)
        await loop.close()
        assert trajectory.reward_parts == {"right": 1.0, "brief": 1.0}
