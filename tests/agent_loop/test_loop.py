"""How trajectories end: every outcome, every budget."""

import asyncio
import threading
from array import array

import msgspec
import pytest

from slipstream import AgentLoop, Environment, Outcome, Task, reward, tool
from slipstream.agent_loop import loop as loop_module
from slipstream.agent_loop.episode import turn_seed
from slipstream.agent_loop.sampler import EngineFailed, Finish
from slipstream.errors import UserError
from slipstream.rewards import exact_match
from slipstream.tools import ToolFailed
from slipstream.trajectory import SpanKind, TrajectoryDetail


@tool
def echo(text: str) -> str:
    """Say it again."""
    return text


@tool
def hang(text: str) -> str:
    """Never end."""
    threading.Event().wait()
    return text


@tool
async def hang_softly(text: str) -> str:
    """Never end, and take no for an answer."""
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if text == "for ever":
                continue
            raise


@tool
def broken(text: str) -> str:
    """Infrastructure that breaks."""
    raise ToolFailed("the database is gone")


def call(name: str, text: str = "x") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"text": "{text}"}}}}\n</tool_call>'


def world(*tools, rewards=(exact_match,)) -> Environment:
    return Environment(tools=tools or [echo], rewards=rewards)


def detail(trajectory) -> TrajectoryDetail:
    return msgspec.json.decode(trajectory.detail, type=TrajectoryDetail)


def sampled_tokens(trajectory) -> int:
    return sum(trajectory.sampled)


async def test_finished(play, script):
    sampler = script("Hm. " + call("echo", "one") + call("echo", "two"), "done")
    trajectory = await play(world(), sampler)
    assert trajectory.outcome is Outcome.FINISHED
    assert (trajectory.lease, trajectory.group, trajectory.task, trajectory.attempt) == (7, 3, "t", 1)
    assert (trajectory.turns, trajectory.tool_calls, trajectory.tool_errors) == (2, 2, 0)
    assert (trajectory.reward, trajectory.reward_parts) == (1.0, {"exact_match": 1.0})
    assert trajectory.t_leased == 1.0 < trajectory.t_first_token <= trajectory.t_done
    assert trajectory.s_generate == pytest.approx(0.02)
    messages = detail(trajectory).messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [message["content"] for message in messages[1:]] == ["Hm.", "one", "two", "done"]


async def test_parallel_calls_are_one_turn_of_the_template(play, script, renderer):
    trajectory = await play(world(), script(call("echo", "one") + call("echo", "two")))
    (span,) = [span for span in trajectory.spans if span.kind is SpanKind.TOOL]
    text = renderer.decode(trajectory.token_ids[span.start : span.start + span.length])
    result = "<|im_start|>tool\n<tool_response>\n{}\n</tool_response><|im_end|>\n"
    assert text == "\n" + result.format("one") + result.format("two") + "<|im_start|>assistant\n"


async def test_calls_run_side_by_side(play, script):
    both = asyncio.Barrier(2)

    @tool
    async def meet() -> str:
        """End when two are here."""
        await both.wait()
        return "met"

    trajectory = await play(world(meet), script('<tool_call>{"name": "meet"}</tool_call>' * 2))
    assert (trajectory.tool_calls, trajectory.tool_errors) == (2, 0)


async def test_truncated_tokens_when_the_budget_is_out(play, script):
    sampler = script("word " * 100 + call("echo"))
    trajectory = await play(world(), sampler, max_tokens=20)
    assert trajectory.outcome is Outcome.TRUNCATED_TOKENS
    assert sampled_tokens(trajectory) == 20
    assert trajectory.reward == 0.0
    assert trajectory.tool_calls == 0


async def test_a_call_that_was_cut_is_not_run(play, script, renderer):
    def cut(request):
        return sampler.say(call("echo"), request)

    sampler = script(cut)
    trajectory = await play(world(), sampler, max_tokens=len(renderer.encode(call("echo"))))
    assert trajectory.outcome is Outcome.TRUNCATED_TOKENS
    assert trajectory.tool_calls == 0


async def test_the_token_budget_is_over_all_turns(play, script):
    sampler = script(call("echo"), last="word " * 300)
    trajectory = await play(world(), sampler, max_tokens=100)
    assert trajectory.outcome is Outcome.TRUNCATED_TOKENS
    assert sampled_tokens(trajectory) == 100
    assert [request.max_tokens for request in sampler.requests] == [100, 100 - len(sampler.samples[0].token_ids)]


async def test_a_budget_that_ends_with_the_turn_runs_no_tool(play, script):
    probe = script(call("echo"))
    await play(world(), probe)
    spent = len(probe.samples[0].token_ids)
    trajectory = await play(world(), script(call("echo")), max_tokens=spent)
    assert (trajectory.outcome, trajectory.tool_calls) == (Outcome.TRUNCATED_TOKENS, 0)


async def test_truncated_tokens_when_the_engine_has_no_room_for_the_tools_result(play, script):
    sampler = script(call("echo", "word " * 60), max_model_len=500)
    trajectory = await play(world(), sampler, tool_tokens=400)
    assert trajectory.outcome is Outcome.TRUNCATED_TOKENS
    assert len(trajectory.token_ids) < 500
    assert [span.kind for span in trajectory.spans] == [SpanKind.PROMPT, SpanKind.SAMPLED]
    assert detail(trajectory).messages[-1]["role"] == "tool"


async def test_truncated_turns(play, script):
    ran = []

    @tool
    def count() -> None:
        """Count."""
        ran.append(1)

    trajectory = await play(world(count), script(last='<tool_call>{"name": "count"}</tool_call>'), max_turns=3)
    assert (trajectory.outcome, trajectory.turns, len(ran)) == (Outcome.TRUNCATED_TURNS, 3, 2)
    assert trajectory.reward == 0.0


async def test_endless_bad_calls_end_with_the_turns(play, script):
    trajectory = await play(world(), script(last=call("nobody")), max_turns=4)
    assert (trajectory.outcome, trajectory.tool_errors) == (Outcome.TRUNCATED_TURNS, 3)


async def test_timeout_keeps_what_was_sampled(play, script):
    async def slow(request):
        await asyncio.sleep(request.seconds)
        sample = sampler.say("half of", request)
        return msgspec.structs.replace(sample, finish=Finish.ABORTED)

    sampler = script(call("echo"), slow)
    trajectory = await play(world(), sampler, max_seconds=0.3)
    assert trajectory.outcome is Outcome.TIMEOUT
    assert "max_seconds" in detail(trajectory).error
    assert sampled_tokens(trajectory) == sum(len(sample.token_ids) for sample in sampler.samples)
    assert trajectory.turns == 2
    assert trajectory.reward is None


@pytest.mark.parametrize("name", ["hang", "hang_softly"])
async def test_timeout_in_a_tool_that_outlives_the_trajectory(play, script, name):
    trajectory = await play(world(hang, hang_softly), script(call(name)), max_seconds=0.3)
    assert trajectory.outcome is Outcome.TIMEOUT
    assert name in detail(trajectory).error
    assert sampled_tokens(trajectory) > 0
    assert 0.2 < trajectory.s_tool < 5


@pytest.mark.parametrize(("name", "text"), [("hang", "x"), ("hang_softly", "x"), ("hang_softly", "for ever")])
async def test_a_tool_that_hangs_is_an_error_and_the_trajectory_goes_on(play, script, name, text):
    trajectory = await play(world(hang, hang_softly), script(call(name, text)), tool_seconds=0.1)
    assert trajectory.outcome is Outcome.FINISHED
    assert (trajectory.tool_calls, trajectory.tool_errors) == (1, 1)
    assert detail(trajectory).messages[2]["content"] == f"Error: {name} did not end within 0.1 s"
    for task in asyncio.all_tasks() - {asyncio.current_task()}:  # the one that takes no cancellation
        task.get_coro().close()


async def test_an_engine_that_ignores_the_deadline_is_cancelled(play, script, monkeypatch):
    monkeypatch.setattr(loop_module, "GRACE_SECONDS", 0.1)

    async def never(request):
        await asyncio.Event().wait()

    trajectory = await play(world(), script(call("echo"), never), max_seconds=0.2)
    assert trajectory.outcome is Outcome.TIMEOUT
    assert "cancelled" in detail(trajectory).error
    assert trajectory.turns == 1


async def test_tool_failed(play, script):
    trajectory = await play(world(echo, broken), script(call("echo") + call("broken")))
    assert trajectory.outcome is Outcome.TOOL_FAILED
    assert "the database is gone" in detail(trajectory).error
    assert trajectory.reward is None
    assert sampled_tokens(trajectory) > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1"])
async def test_reward_failed_by_value(play, script, value):
    @reward
    def judge(answer: str) -> float:
        return value

    trajectory = await play(world(rewards=[judge]), script())
    assert trajectory.outcome is Outcome.REWARD_FAILED
    assert trajectory.reward is None
    assert "judge" in detail(trajectory).error


async def test_reward_failed_by_raising(play, script):
    @reward
    def judge(answer: str) -> float:
        raise ValueError("signal only works in main thread")

    trajectory = await play(world(rewards=[judge]), script())
    assert trajectory.outcome is Outcome.REWARD_FAILED
    assert trajectory.reward is None
    error = detail(trajectory).error
    assert "Traceback" in error
    assert "signal only works" in error


async def test_a_reward_sees_the_trajectory(play, script):
    seen = []

    @reward(weight=0.5)
    def judge(trajectory, answer, task, messages):
        seen.append((trajectory.outcome, answer, task.id, messages[-1]["content"]))
        return len(trajectory.token_ids)

    trajectory = await play(world(rewards=[exact_match, judge]), script())
    assert seen == [(Outcome.FINISHED, "done", "t", "done")]
    assert trajectory.reward == 1 + 0.5 * len(trajectory.token_ids)
    assert trajectory.reward_parts == {"exact_match": 1.0, "judge": float(len(trajectory.token_ids))}


@pytest.mark.parametrize(
    "raised", [EngineFailed("out of memory"), RuntimeError("out of memory"), TimeoutError("out of memory")]
)
async def test_engine_failed(play, script, raised):
    def fail(request):
        raise raised

    trajectory = await play(world(), script(call("echo"), fail))
    assert trajectory.outcome is Outcome.ENGINE_FAILED
    assert "out of memory" in detail(trajectory).error
    assert trajectory.turns == 1
    assert sampled_tokens(trajectory) > 0
    assert trajectory.reward is None


async def test_an_engine_that_cancels_from_within_has_failed(play, script):
    def fail(request):
        raise asyncio.CancelledError

    assert (await play(world(), script(fail))).outcome is Outcome.ENGINE_FAILED


@pytest.mark.parametrize("logprobs", [[float("nan")], [float("-inf")], [-1.0, -1.0]])
async def test_a_sample_that_cannot_be_trained_on_is_the_engines_failure(play, script, logprobs):
    def bad(request):
        sample = sampler.say("", request)
        return msgspec.structs.replace(sample, logprobs=array("f", logprobs))

    sampler = script(bad)
    trajectory = await play(world(), sampler)
    assert trajectory.outcome is Outcome.ENGINE_FAILED
    assert sampled_tokens(trajectory) == 0


async def test_cancelled_when_the_engine_aborts_before_the_deadline(play, script):
    def aborted(request):
        return msgspec.structs.replace(sampler.say("half", request), finish=Finish.ABORTED)

    sampler = script(aborted)
    trajectory = await play(world(), sampler)
    assert trajectory.outcome is Outcome.CANCELLED
    assert sampled_tokens(trajectory) == len(sampler.samples[0].token_ids)


async def test_invalid_when_the_prompt_leaves_no_room_and_the_engine_is_not_asked(play, script):
    sampler = script(max_model_len=400)
    trajectory = await play(world(), sampler, prompt="word " * 1000)
    assert trajectory.outcome is Outcome.INVALID
    assert sampler.requests == []
    assert "max_model_len" in detail(trajectory).error
    assert len(trajectory.token_ids) == 0


async def test_a_prompt_that_leaves_room_for_one_token_gets_one(play, script, renderer):
    prompt = renderer.start([{"role": "user", "content": "Say something."}], [echo])
    trajectory = await play(world(), script("many words"), max_tokens=50)
    assert trajectory.token_ids[: len(prompt)].tolist() == prompt
    sampler = script("many words", max_model_len=len(prompt) + 1)
    trajectory = await play(world(), sampler)
    assert (trajectory.outcome, sampled_tokens(trajectory)) == (Outcome.TRUNCATED_TOKENS, 1)
    assert (await play(world(), script(max_model_len=len(prompt)))).outcome is Outcome.INVALID


async def test_an_agents_own_fault_is_a_trajectory_with_its_traceback(renderer, script, limits):
    class Faulty(AgentLoop):
        async def turns(self, episode):
            await self.say(self.begin(episode))
            raise KeyError("my own bug")

    loop = Faulty(world(), renderer, script(), limits)
    task = Task(id="t", prompt="Hi.")
    trajectory = await loop.run(lease=0, group=0, task=task, attempt=0, seed=0, t_leased=0)
    assert trajectory.outcome is Outcome.INVALID
    assert "my own bug" in detail(trajectory).error
    assert sampled_tokens(trajectory) > 0


async def test_text_that_no_tokenizer_takes_is_one_invalid_trajectory(play, script):
    trajectory = await play(world(), script(), prompt="\ud800")
    assert trajectory.outcome is Outcome.INVALID
    assert "surrogate" in detail(trajectory).error


@pytest.mark.parametrize("where", ["engine", "hang_softly", "hang"])
async def test_cancelling_leaves_nothing_behind(renderer, script, limits, where):
    there = asyncio.Event()

    async def never(request):
        there.set()
        await asyncio.Event().wait()

    sampler = script(never if where == "engine" else call(where))
    environment = world(hang, hang_softly)
    loop = AgentLoop(environment, renderer, sampler, limits, on_tools=lambda lease, busy: busy and there.set())
    before = asyncio.all_tasks()
    task = Task(id="t", prompt="Hi.")
    run = asyncio.ensure_future(loop.run(lease=1, group=0, task=task, attempt=0, seed=0, t_leased=0))
    await there.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    if left := asyncio.all_tasks() - before:  # a cancelled tool ends in its own time
        _, still_there = await asyncio.wait(left, timeout=5)
        assert not still_there
    assert sampler.running == 0
    assert loop.tokens_in_flight(1) == 0


async def test_live_accounts(renderer, script, limits):
    waits = []

    @tool
    def peek() -> int:
        """How many tokens were sampled so far."""
        return loop.tokens_in_flight(5)

    sampler = script('<tool_call>{"name": "peek"}</tool_call>')
    loop = AgentLoop(world(peek), renderer, sampler, limits, on_tools=lambda *state: waits.append(state))
    task = Task(id="t", prompt="Hi.")
    trajectory = await loop.run(lease=5, group=0, task=task, attempt=0, seed=0, t_leased=0)
    assert detail(trajectory).messages[2]["content"] == str(len(sampler.samples[0].token_ids))
    assert waits == [(5, True), (5, False)]


async def test_turns_have_seeds_of_their_own(play, script):
    sampler = script(call("echo"))
    await play(world(), sampler)
    assert [request.seed for request in sampler.requests] == [turn_seed(11, 0), turn_seed(11, 1)]
    seeds = {turn_seed(seed, turn) for seed in range(100) for turn in range(100)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_a_long_result_is_cut_and_says_so(play, script):
    @tool
    def flood() -> str:
        """Much."""
        return "word " * 200_000

    trajectory = await play(world(flood), script('<tool_call>{"name": "flood"}</tool_call>'), tool_tokens=32)
    shown = detail(trajectory).messages[2]["content"]
    assert shown.startswith("word word")
    assert "[cut: 1000000 characters" in shown
    tool_span = next(span for span in trajectory.spans if span.kind is SpanKind.TOOL)
    assert tool_span.length < 32 + 80


def test_a_template_without_tools_is_refused_when_the_loop_is_made(script, limits, plain_renderer):
    AgentLoop(Environment(rewards=[exact_match]), plain_renderer, script(), limits)
    with pytest.raises(UserError, match="tools"):
        AgentLoop(world(), plain_renderer, script(), limits)


async def test_many_that_begin_at_once_leave_the_loop_a_round_each(renderer, script, limits):
    rounds, begun = 0, []

    class Counted(AgentLoop):
        def begin(self, episode):
            begun.append(rounds)
            return super().begin(episode)

    async def tick() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    loop = Counted(world(), renderer, script(), limits)
    task = Task(id="t", prompt="?")
    await asyncio.gather(*(loop.run(lease=n, group=0, task=task, attempt=0, seed=n, t_leased=0.0) for n in range(20)))
    ticking.cancel()
    assert len(set(begun)) == 20
