"""Agents that know nothing of us, through the real clients: their calls are one trajectory, token for token."""

import asyncio
import json

import anthropic
import httpx
import msgspec
import openai
import pytest
from one_stream import branches, each_sample_once, said

from slipstream import AgentLoop, Environment, Outcome
from slipstream.rewards import exact_match
from slipstream.task import Task

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
LOOK = {"type": "function", "function": {"name": "look", "description": "Look at something.", "parameters": PARAMETERS}}
LOOK_FLAT = {"type": "function", "name": "look", "description": "Look at something.", "parameters": PARAMETERS}
LOOK_ANTHROPIC = {"name": "look", "description": "Look at something.", "input_schema": PARAMETERS}
ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is it?"}]


@pytest.fixture
def serve(renderer, limits):
    """Run an agent of two arguments, the task and its endpoint."""

    async def run(agent, sampler, **changed):
        async def led(task, chat):
            return await agent(task, await chat.serve())

        environment = Environment(rewards=[exact_match], agent=led)
        loop = AgentLoop(environment, renderer, sampler, msgspec.structs.replace(limits, **changed))
        task = Task(id="t", prompt="What is it?", answer="done")
        try:
            return await loop.run(lease=7, group=3, task=task, attempt=1, seed=11, t_leased=1.0)
        finally:
            await loop.close()

    return run


def chat_client(endpoint) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=endpoint.openai, api_key=endpoint.key, max_retries=0)


def messages_client(endpoint) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=endpoint.anthropic, api_key=endpoint.key, max_retries=0)


async def chat_once(client, messages, stream, **more):
    """(text, calls as messages have them, finish) of one answer."""
    ask = {"model": "any", "messages": messages, "tools": [LOOK], **more}
    if not stream:
        (choice,) = (await client.chat.completions.create(**ask)).choices
        calls = [call.model_dump() for call in choice.message.tool_calls or []]
        return choice.message.content or "", calls, choice.finish_reason
    async with client.chat.completions.stream(**ask) as events:
        choice = (await events.get_final_completion()).choices[0]
    calls = [call.model_dump(include={"id", "type", "function"}) for call in choice.message.tool_calls or []]
    for call in calls:
        call["function"].pop("parsed_arguments", None)
    return choice.message.content or "", calls, choice.finish_reason


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_completions_of_the_openai_client_are_one_stream(serve, script, stream):
    async def agent(task, endpoint):
        async with chat_client(endpoint) as client:
            messages = [*ASK]
            text, calls, finish = await chat_once(client, messages, stream)
            assert (text, finish) == ("Hm.", "tool_calls")
            assert [call["function"]["name"] for call in calls] == ["look", "look"]
            assert json.loads(calls[0]["function"]["arguments"]) == {"at": "it"}
            for call in calls:  # as frameworks do: arguments parsed, and written anew
                call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
            messages.append({"role": "assistant", "content": text or None, "tool_calls": calls})
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "a cat"} for call in calls]
            text, calls, finish = await chat_once(client, messages, stream)
            assert (text, calls, finish) == ("a cat?", [], "stop")
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": [{"type": "text", "text": "Sure?"}]})
            return (await chat_once(client, messages, stream))[0]

    sampler = script(f"<think>\nSo.\n</think>\n\nHm. {CALL}{CALL}", "a cat?", "done")
    trajectory = await serve(agent, sampler)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 1.0), trajectory.detail
    assert (trajectory.turns, trajectory.tool_calls) == (3, 2)
    assert len(branches(trajectory)) == 1
    each_sample_once(trajectory, sampler)
    assert [message["role"] for message in said(trajectory)[1:]] == [
        *("system", "user", "assistant", "tool", "tool", "assistant", "user", "assistant")
    ]


async def test_a_history_that_was_rewritten_is_a_branch(serve, script):
    async def agent(task, endpoint):
        async with chat_client(endpoint) as client:
            first = (await chat_once(client, ASK, False))[0]
            assert (await chat_once(client, ASK, False))[0] == "two"  # once more: another answer to the same
            went_on = [*ASK, {"role": "assistant", "content": first}, {"role": "user", "content": "More."}]
            await chat_once(client, went_on, False)
            await chat_once(client, went_on, False)  # where the branch went on already
            compacted = [ASK[0], {"role": "user", "content": "So far: one, two. Go on."}]
            return (await chat_once(client, compacted, False))[0]

    sampler = script("one", "two", "three", "four", "done")
    trajectory = await serve(agent, sampler)
    assert (trajectory.outcome, trajectory.reward, trajectory.turns) == (Outcome.FINISHED, 1.0, 5), trajectory.detail
    assert len(branches(trajectory)) == 4
    each_sample_once(trajectory, sampler)
    went_on = sampler.requests[2].prompt
    assert went_on == sampler.requests[3].prompt
    so_far = [*sampler.requests[0].prompt, *sampler.samples[0].token_ids]
    assert list(went_on[: len(so_far)]) == so_far


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_of_the_openai_client_are_one_stream(serve, script, stream):
    async def once(client, **ask):
        ask = {"model": "any", "tools": [LOOK_FLAT], "instructions": "Be brief.", **ask}
        if not stream:
            return await client.responses.create(**ask)
        async with client.responses.stream(**ask) as events:
            return await events.get_final_response()

    async def agent(task, endpoint):
        async with chat_client(endpoint) as client:
            first = await once(client, input="What is it?")
            (call,) = [item for item in first.output if item.type == "function_call"]
            assert (first.output_text, call.name, json.loads(call.arguments)) == ("Hm.", "look", {"at": "it"})
            output = {"type": "function_call_output", "call_id": call.call_id, "output": "a cat"}
            second = await once(client, input=[output], previous_response_id=first.id)
            assert second.output_text == "a cat?"
            # The client may also keep the whole conversation itself.
            ours = [{"role": "user", "content": "What is it?"}]
            ours += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output]
            ours += [output, {"role": "assistant", "content": "a cat?"}, {"role": "user", "content": "Sure?"}]
            return (await once(client, input=ours)).output_text

    sampler = script(f"Hm. {CALL}", "a cat?", "done")
    trajectory = await serve(agent, sampler)
    assert (trajectory.outcome, trajectory.reward, trajectory.turns) == (Outcome.FINISHED, 1.0, 3), trajectory.detail
    assert len(branches(trajectory)) == 1
    each_sample_once(trajectory, sampler)


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_of_the_anthropic_client_are_one_stream(serve, script, stream):
    async def once(client, messages):
        ask = {"model": "any", "max_tokens": 500, "system": "Be brief.", "tools": [LOOK_ANTHROPIC]}
        if not stream:
            return await client.messages.create(**ask, messages=messages)
        async with client.messages.stream(**ask, messages=messages) as events:
            return await events.get_final_message()

    async def agent(task, endpoint):
        async with messages_client(endpoint) as client:
            messages = [{"role": "user", "content": "What is it?"}]
            answer = await once(client, messages)
            assert answer.stop_reason == "tool_use"
            text, *uses = answer.content
            assert (text.text, [use.input for use in uses]) == ("Hm.", [{"at": "it"}] * 2)
            results = [{"type": "tool_result", "tool_use_id": use.id, "content": "a cat"} for use in uses]
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
            answer = await once(client, messages)
            assert (answer.stop_reason, answer.usage.output_tokens) == ("end_turn", len(sampler.samples[1].token_ids))
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "Sure?"}]
            return (await once(client, messages)).content[0].text

    sampler = script(f"Hm. {CALL}{CALL}", "a cat?", "done")
    trajectory = await serve(agent, sampler)
    assert (trajectory.outcome, trajectory.reward, trajectory.turns) == (Outcome.FINISHED, 1.0, 3), trajectory.detail
    assert len(branches(trajectory)) == 1
    each_sample_once(trajectory, sampler)


async def test_a_call_that_cannot_be_read_is_text_and_a_cut_turn_has_no_calls(serve, script):
    async def agent(task, endpoint):
        async with chat_client(endpoint) as client:
            text, calls, finish = await chat_once(client, ASK, False)
            assert (text, calls, finish) == ("<tool_call>{oops}</tool_call>", [], "stop")
            text, calls, finish = await chat_once(client, ASK, False, max_tokens=20)
            assert (calls, finish) == ([], "length")
            back = [*ASK, {"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
            return (await chat_once(client, back, False))[0]

    sampler = script("<tool_call>{oops}</tool_call>", CALL + " " * 40, "done")
    trajectory = await serve(agent, sampler)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 1.0), trajectory.detail
    assert len(sampler.samples[1].token_ids) == 20
    each_sample_once(trajectory, sampler)


async def test_bad_requests_are_answered_as_the_api_does(serve, script):
    user = [{"role": "user", "content": "Hi."}]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]
    lost = [*user, {"role": "tool", "tool_call_id": "call_9", "content": "?"}]

    async def agent(task, endpoint):
        async with chat_client(endpoint) as client, messages_client(endpoint) as other:
            create = client.chat.completions.create
            for says, ask in {
                "n is not supported": {"messages": user, "n": 2},
                "logprobs is not": {"messages": user, "logprobs": True},
                "stop is not": {"messages": user, "stop": ["x"]},
                "tool_choice is auto or none": {"messages": user, "tool_choice": "required"},
                "response_format is text": {"messages": user, "response_format": {"type": "json_object"}},
                "type 'image_url'": {"messages": image},
                "names the call 'call_9'": {"messages": lost},
                "messages end with": {"messages": [*user, {"role": "assistant", "content": "He"}]},
                "messages\\[0\\]": {"messages": [{"role": "king", "content": "Hi."}]},
                "at most -1": {"messages": user, "max_tokens": -1},
            }.items():
                with pytest.raises(openai.BadRequestError, match=says) as refused:
                    await create(model="m", **ask)
                assert refused.value.type == "invalid_request_error"
            with pytest.raises(openai.NotFoundError, match="there is no answer 'resp_5'"):
                await client.responses.create(model="m", input="Hi.", previous_response_id="resp_5")
            with pytest.raises(openai.BadRequestError, match="'web_search' would run elsewhere"):
                await client.responses.create(model="m", input="Hi.", tools=[{"type": "web_search"}])
            with pytest.raises(openai.NotFoundError, match="there is no POST"):
                await client.embeddings.create(model="m", input="Hi.")
            with pytest.raises(anthropic.BadRequestError, match="stop_sequences is not supported") as refused:
                await other.messages.create(model="m", max_tokens=5, messages=user, stop_sequences=["x"])
            assert refused.value.body["error"]["type"] == "invalid_request_error"
            with pytest.raises(openai.BadRequestError, match="too long") as full:
                await create(model="m", messages=[{"role": "user", "content": "word " * 3000}])
            assert full.value.code == "context_length_exceeded"
            assert [each.id async for each in client.models.list()] == ["policy"]
            return (await create(model="m", messages=user)).choices[0].message.content

    trajectory = await serve(agent, script(max_model_len=1000))
    assert (trajectory.outcome, trajectory.reward, trajectory.turns) == (Outcome.FINISHED, 1.0, 1), trajectory.detail


async def test_a_budget_that_is_out_ends_the_trajectory_and_says_so(serve, script):
    async def agent(task, endpoint):
        async with chat_client(endpoint) as client, messages_client(endpoint) as other:
            for _ in range(2):
                await chat_once(client, ASK, False)
            with pytest.raises(openai.PermissionDeniedError, match=r"truncated_turns; .*rollout.max_turns"):
                await chat_once(client, ASK, False)
            with pytest.raises(anthropic.PermissionDeniedError, match="truncated_turns"):
                await other.messages.create(model="m", max_tokens=5, messages=ASK[1:])
            return "never mind"

    trajectory = await serve(agent, script(), max_turns=2)
    assert (trajectory.outcome, trajectory.turns) == (Outcome.TRUNCATED_TURNS, 2)


async def test_an_ended_trajectory_and_a_wrong_key_are_not_found(renderer, script, limits):
    endpoints = []

    async def led(task, chat):
        endpoints.append(await chat.serve())
        await chat.say()

    loop = AgentLoop(Environment(rewards=[exact_match], agent=led), renderer, script(), limits)
    task = Task(id="t", prompt="Hi.", answer="done")
    assert (await loop.run(lease=0, group=0, task=task, attempt=0, seed=0, t_leased=0)).reward == 1.0
    (endpoint,) = endpoints
    async with chat_client(endpoint) as client, messages_client(endpoint) as other:
        with pytest.raises(openai.NotFoundError, match="it has ended"):
            await client.chat.completions.create(model="m", messages=ASK)
        with pytest.raises(anthropic.NotFoundError, match="it has ended"):
            await other.messages.create(model="m", max_tokens=5, messages=ASK[1:])
        assert endpoint.openai.startswith("http://127.0.0.1:")
    await loop.close()


async def test_the_key_may_also_be_the_api_key(serve, script):
    async def agent(task, endpoint):
        plain = endpoint.anthropic.removesuffix(f"/{endpoint.key}")
        async with openai.AsyncOpenAI(base_url=f"{plain}/v1", api_key=endpoint.key) as client:
            await client.chat.completions.create(model="m", messages=ASK)
        async with anthropic.AsyncAnthropic(base_url=plain, api_key=endpoint.key) as client:
            return (await client.messages.create(model="m", max_tokens=50, messages=ASK[1:])).content[0].text

    trajectory = await serve(agent, script())
    assert (trajectory.reward, trajectory.turns) == (1.0, 2), trajectory.detail


async def test_a_client_that_goes_away_wants_no_more_tokens(serve, script):
    asked, cancelled = asyncio.Event(), asyncio.Event()

    async def never(request):
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def agent(task, endpoint):
        async with httpx.AsyncClient() as client:
            going = asyncio.create_task(
                client.post(f"{endpoint.openai}/chat/completions", json={"model": "m", "messages": ASK})
            )
            await asked.wait()
            going.cancel()
            await cancelled.wait()
        async with chat_client(endpoint) as client:
            return (await chat_once(client, ASK, False))[0]

    trajectory = await serve(agent, script(never, "done"))
    assert (trajectory.outcome, trajectory.reward, trajectory.turns) == (Outcome.FINISHED, 1.0, 1), trajectory.detail


async def test_an_agent_that_leaves_a_request_behind_leaves_no_sampling_behind(serve, script):
    asked = asyncio.Event()
    left = []

    async def never(request):
        asked.set()
        await asyncio.Event().wait()

    async def agent(task, endpoint):
        client = chat_client(endpoint)
        await chat_once(client, ASK, False)
        left.append(asyncio.create_task(chat_once(client, ASK, False)))
        await asked.wait()
        return "done"

    sampler = script("one", never)
    trajectory = await serve(agent, sampler)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 1.0)
    with pytest.raises(openai.NotFoundError):
        await left[0]
    assert sampler.running == 0
