"""An agent of one's own: what it may do, what ends it, and that its stream is the one that was sampled."""

import pytest

from slipstream import Environment, Outcome, tool
from slipstream.errors import UserError
from slipstream.rewards import exact_match


@tool
async def echo(text: str) -> str:
    """Say it again."""
    return text


CALL = '<tool_call>\n{"name": "echo", "arguments": {"text": "hi"}}\n</tool_call>'


def led_by(agent) -> Environment:
    return Environment(tools=[echo], rewards=[exact_match], agent=agent)


async def test_an_agent_talks_runs_tools_and_talks_back(play, script):
    seen = []

    async def agent(task, chat):
        said = await chat.say()
        seen.append((said.text, [call.name for call in said.calls], said.cut, await chat.run(said.calls)))
        await chat.say()
        chat.tell("Are you sure?")
        seen.append((await chat.say()).text)
        seen.append([message["role"] for message in chat.messages])
        assert task.id == "t"

    sampler = script("Hm. " + CALL, "maybe", "done")
    trajectory = await play(led_by(agent), sampler)
    assert (trajectory.outcome, trajectory.reward, trajectory.turns) == (Outcome.FINISHED, 1.0, 3)
    assert seen[:2] == [("Hm.", ["echo"], False, ["hi"]), "done"]
    assert seen[2] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    kinds = [span.kind for span in trajectory.spans]
    assert "".join(kind[0] for kind in kinds) == "pstsps"  # prompt, sampled, tool
    for asked, sample in zip(sampler.requests, sampler.samples, strict=True):  # each prompt goes on from the last
        so_far = [*asked.prompt, *sample.token_ids]
        assert list(trajectory.token_ids[: len(so_far)]) == so_far
    assert sum(trajectory.sampled) == sum(len(sample.token_ids) for sample in sampler.samples)


async def test_budgets_end_an_agent_that_goes_on(play, script):
    async def agent(task, chat):
        while True:
            await chat.say()
            chat.tell("Go on.")

    assert (await play(led_by(agent), script(), max_turns=3)).outcome is Outcome.TRUNCATED_TURNS
    spent = await play(led_by(agent), script(last="word " * 30), max_tokens=100)
    assert (spent.outcome, sum(spent.sampled)) == (Outcome.TRUNCATED_TOKENS, 100)


async def test_what_ended_it_cannot_be_swallowed(play, script):
    async def agent(task, chat):
        for _ in range(10):
            try:
                await chat.say()
                chat.tell("Go on.")
            except Exception:
                continue

    assert (await play(led_by(agent), script(), max_turns=3)).outcome is Outcome.TRUNCATED_TURNS


async def test_a_cut_turn_is_truncated_also_when_the_agent_stops_there(play, script):
    async def agent(task, chat):
        assert (await chat.say()).cut

    assert (await play(led_by(agent), script("word " * 100), max_tokens=20)).outcome is Outcome.TRUNCATED_TOKENS


async def test_an_agents_own_faults_are_invalid_and_say_why(play, script):
    async def nothing(task, chat):
        pass

    async def twice(task, chat):
        await chat.say()
        await chat.say()

    async def early(task, chat):
        chat.tell("Hello?")

    async def broken(task, chat):
        raise KeyError("oops")

    says = {nothing: b"before the model had said", twice: b"say() after say()", early: b"say() first", broken: b"oops"}
    for agent, why in says.items():
        trajectory = await play(led_by(agent), script())
        assert trajectory.outcome is Outcome.INVALID
        assert why in trajectory.detail


def test_an_agent_is_an_async_function():
    with pytest.raises(UserError, match=r"write async def agent\(task, chat\)"):
        led_by(lambda task, chat: None)
