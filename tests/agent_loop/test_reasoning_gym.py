"""Real generators of reasoning-gym as tasks and rewards."""

import msgspec
import pytest

from slipstream import AgentLoop, Environment, Outcome
from slipstream.adapters.reasoning_gym import ReasoningGym
from slipstream.errors import UserError
from slipstream.task import load_tasks

SOURCE = """
from slipstream import Environment
from slipstream.adapters.reasoning_gym import ReasoningGym

gym = ReasoningGym("chain_sum", size=5, min_terms=2, max_terms=3, max_digits=2)
environment = Environment(rewards=[gym.reward], system=gym.system)
tasks = gym.tasks
"""


async def test_its_tasks_are_solved_by_its_answers_and_by_no_others(tmp_path, renderer, script, limits):
    (tmp_path / "world.py").write_text(SOURCE)
    tasks = load_tasks(f"{tmp_path}/world.py:tasks", "tasks.train", seed=3)
    assert [task.id for task in tasks] == [f"chain_sum/3/{number}" for number in range(5)]
    assert tasks != load_tasks(f"{tmp_path}/world.py:tasks", "tasks.train", seed=4)
    gym = ReasoningGym("chain_sum", size=5, min_terms=2, max_terms=3, max_digits=2)  # as in another process
    environment = Environment(rewards=[gym.reward], system=gym.system)
    task = msgspec.json.decode(msgspec.json.encode(tasks[1]), type=type(tasks[1]))
    found = []
    for said in (f"So. <answer> {task.answer} </answer>", f"{task.answer}\n", f"<answer>{task.answer}9</answer>", ""):
        loop = AgentLoop(environment, renderer, script(said), limits)
        trajectory = await loop.run(lease=0, group=0, task=task, attempt=0, seed=0, t_leased=0)
        assert trajectory.outcome is Outcome.FINISHED, trajectory.detail
        found.append(trajectory.reward)
    assert found[:2] == [1.0, 1.0]
    assert found[2] < 1.0  # the generator gives something for what is near
    assert found[3] == 0.0
    assert list(trajectory.reward_parts) == ["solved"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ReasoningGym("chain_some"), "chain_some"),
        (lambda: ReasoningGym("chain_sum", terms=2), "unexpected keyword argument 'terms'"),
        (lambda: ReasoningGym("chain_sum", min_terms=0), "min_terms must be positive"),
        (lambda: ReasoningGym("chain_sum", size=0), "size=0"),
    ],
)
def test_what_the_generator_does_not_know_is_refused_when_the_file_is_read(make, says):
    with pytest.raises(UserError, match=says):
        make()
