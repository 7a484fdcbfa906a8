"""Agents with several conversations: compaction, sub-agents, forks; one trajectory, each sampled token in it once."""

import asyncio

import pytest
from one_stream import branches, each_sample_once, said

from slipstream import AgentLoop, Environment, Outcome, tool
from slipstream.agent_loop import ContextFull
from slipstream.agent_loop.stream import TokenStream, end_to_end
from slipstream.rewards import exact_match
from slipstream.task import Task
from slipstream.trajectory import SpanKind


@tool
async def echo(text: str) -> str:
    """Say it again."""
    return text


@tool
async def secret() -> str:
    """What only some may know."""
    return "42"


CALL = '<tool_call>\n{"name": "echo", "arguments": {"text": "hi"}}\n</tool_call>'


def led_by(agent) -> Environment:
    return Environment(tools=[echo, secret], rewards=[exact_match], agent=agent)


async def test_compaction_goes_on_in_a_short_conversation(play, script, renderer):
    async def agent(task, chat):
        said = await chat.say()
        while said.calls:
            await chat.run(said.calls)
            if chat.room < 700:
                said = await chat.say()
                chat = chat.branch([chat.messages[0], {"role": "user", "content": f"So far: {said.text}."}])
            said = await chat.say()

    sampler = script(CALL, CALL + " " * 300, "hi was said", CALL, "done", max_model_len=1000)
    trajectory = await play(led_by(agent), sampler)
    assert (trajectory.outcome, trajectory.reward, trajectory.turns) == (Outcome.FINISHED, 1.0, 5)
    each_sample_once(trajectory, sampler)
    assert len(branches(trajectory)) == 2
    assert len(sampler.requests[3].prompt) < len(sampler.requests[2].prompt)
    assert b"So far: hi was said." in trajectory.detail


async def test_a_full_conversation_is_left_for_another(play, script):
    full = []

    async def agent(task, chat):
        said = await chat.say()
        try:
            await chat.run([*said.calls] * 60)
        except ContextFull as error:
            full.append((str(error), chat.room))
            with pytest.raises(ContextFull):
                await chat.say()
            chat = chat.branch(chat.messages[:1])
        await chat.say()

    sampler = script(CALL, "done", max_model_len=600)
    trajectory = await play(led_by(agent), sampler)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 1.0)
    assert "engine.max_model_len" in full[0][0]
    assert full[0][1] == 0
    each_sample_once(trajectory, sampler)

    async def gives_up(task, chat):
        said = await chat.say()
        await asyncio.gather(chat.run([*said.calls] * 60))

    trajectory = await play(led_by(gives_up), script(CALL, max_model_len=600))
    assert trajectory.outcome is Outcome.TRUNCATED_TOKENS


async def test_sub_agents_speak_side_by_side_with_their_own_tools(play, script):
    async def child(chat, number):
        said = await chat.say()
        (result,) = await chat.run(said.calls)
        return f"{number}: {result}"

    async def agent(task, chat):
        await chat.say()
        async with asyncio.TaskGroup() as group:
            ask = [{"role": "user", "content": "Find it."}]
            tasks = [group.create_task(child(chat.branch(ask, tools=["echo"]), number)) for number in range(3)]
        chat.tell("; ".join(task.result() for task in tasks))
        await chat.say()

    steal = '<tool_call>\n{"name": "secret", "arguments": {}}\n</tool_call>'
    sampler = script("I ask others.", CALL, steal, CALL, "done")
    trajectory = await play(led_by(agent), sampler)
    assert (trajectory.outcome, trajectory.reward, trajectory.turns) == (Outcome.FINISHED, 1.0, 5)
    assert b"1: Error: there is no tool 'secret'; there are: echo" in trajectory.detail
    assert b"0: hi; " in trajectory.detail
    assert len(branches(trajectory)) == 4
    each_sample_once(trajectory, sampler)
    assert len({request.seed for request in sampler.requests}) == 5


async def test_a_fork_begins_with_what_was_sampled_and_trains_it_once(play, script):
    async def agent(task, chat):
        await chat.say()
        chat.tell("Again?")
        others = [chat.branch() for _ in range(2)]
        tried = [(await each.say()).text for each in (chat, *others)]
        return "done" if tried == ["one", "two", "three"] else ""

    sampler = script("first words", "one", "two", "three")
    trajectory = await play(led_by(agent), sampler)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 1.0)
    each_sample_once(trajectory, sampler)
    assert sampler.requests[1].prompt == sampler.requests[2].prompt == sampler.requests[3].prompt
    kinds = "".join(span.kind[0] for span in trajectory.spans)
    assert kinds == "psps" + "bs" + "bs"
    messages = [message["content"] for message in said(trajectory)]
    assert messages == ["Say something.", "first words", "Again?", "one", "two", "three"]  # each once


async def test_budgets_are_the_trajectorys(play, script):
    async def agent(task, chat):
        while True:
            await chat.say()
            chat = chat.branch(chat.messages[:1])

    trajectory = await play(led_by(agent), script(), max_turns=3)
    assert (trajectory.outcome, trajectory.turns) == (Outcome.TRUNCATED_TURNS, 3)
    trajectory = await play(led_by(agent), script(last="word " * 30), max_tokens=100)
    assert (trajectory.outcome, sum(trajectory.sampled)) == (Outcome.TRUNCATED_TOKENS, 100)


async def test_a_budget_that_is_out_in_a_group_of_sub_agents_is_no_fault(play, script):
    async def endless(chat):
        while True:
            await chat.say()
            chat.tell("Go on.")

    async def agent(task, chat):
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(endless(chat.branch()))

    sampler = script()
    trajectory = await play(led_by(agent), sampler)
    assert (trajectory.outcome, trajectory.turns) == (Outcome.TRUNCATED_TURNS, 6)
    each_sample_once(trajectory, sampler)
    assert trajectory.reward == 1.0  # of the last turn


async def test_what_is_no_branch_is_refused(play, script):
    async def unknown(task, chat):
        chat.branch(chat.messages, tools=["sing"])

    async def twice(task, chat):
        await asyncio.gather(chat.say(), chat.say())

    async def early(task, chat):
        async with asyncio.TaskGroup() as group:
            group.create_task(chat.say())
            await asyncio.sleep(0)
            chat.branch()

    async def number(task, chat):
        await chat.say()
        return 7

    says = {unknown: b"no sing", twice: b"while the model speaks", early: b"branch() while", number: b"returned int"}
    for agent, why in says.items():
        trajectory = await play(led_by(agent), script())
        assert trajectory.outcome is Outcome.INVALID
        assert why in trajectory.detail


async def test_a_loop_of_ones_own_may_branch_too(renderer, script, limits):
    class Twice(AgentLoop):
        async def turns(self, episode):
            first = self.begin(episode)
            await self.say(first)
            second = self.branch(episode, [{"role": "user", "content": "And now?"}], self.environment.tools)
            await self.say(second)
            return Outcome.FINISHED

    sampler = script("one", "done")
    loop = Twice(led_by(None), renderer, sampler, limits)
    task = Task(id="t", prompt="Hi.", answer="done")
    trajectory = await loop.run(lease=0, group=0, task=task, attempt=0, seed=0, t_leased=0)
    assert trajectory.reward == 1.0
    each_sample_once(trajectory, sampler)


def test_a_stream_alone_is_itself():
    stream = TokenStream()
    stream.append_text([1, 2], SpanKind.PROMPT, 0)
    alone = end_to_end([stream])
    assert alone.token_ids == stream.token_ids
    assert alone.spans == stream.spans
    assert end_to_end([]).spans == []
