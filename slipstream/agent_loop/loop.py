"""The agent loop: one task in, one trajectory out, whatever happens in between.

Invariant: `run` returns a Trajectory whose stream holds every token that was sampled, with the outcome that ended it;
only cancellation escapes. The prompt of turn k+1 is exactly the stream after turn k plus newly rendered tokens.
"""

import asyncio
import hashlib
import math
import time
import traceback
from collections.abc import Callable

import msgspec

from slipstream.agent_loop.calls import ToolCall
from slipstream.agent_loop.chat import Conversation
from slipstream.agent_loop.ended import Ended
from slipstream.agent_loop.environment import Environment
from slipstream.agent_loop.renderer import Renderer
from slipstream.agent_loop.sampler import EngineFailed, Finish, Sample, Sampler, SampleRequest
from slipstream.agent_loop.stream import TokenStream
from slipstream.agent_loop.text import Messages
from slipstream.config import RolloutSection
from slipstream.rewards import Evidence, RewardFailed, score
from slipstream.task import Task
from slipstream.tools import Executor, Session, ToolError, ToolResult
from slipstream.tooluse import ToolUse
from slipstream.trajectory import Outcome, SpanKind, Trajectory, TrajectoryDetail
from slipstream.usercall import UserCalls

SCORED = frozenset({Outcome.FINISHED, Outcome.TRUNCATED_TOKENS, Outcome.TRUNCATED_TURNS})
# The engine and the tools keep to the deadline themselves; past it by this much, the trajectory is ended from outside.
GRACE_SECONDS = 10.0
LEAST_REWARD_SECONDS = 10.0  # for the rewards of a trajectory that ended close to its deadline


class Episode:
    """The state of one attempt while it runs."""

    def __init__(self, lease: int, task: Task, seed: int, seconds: float) -> None:
        self.lease, self.task, self.seed = lease, task, seed
        self.began = time.monotonic()
        self.deadline = self.began + seconds
        self.stream = TokenStream()
        self.messages: Messages = []
        self.tools: Session  # open while the agent runs
        self.answer = ""
        self.turn = 0
        self.tool_calls = 0
        self.tool_errors = 0
        self.t_first_token = 0.0
        self.s_generate = 0.0
        self.s_tool = 0.0

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()


def turn_seed(seed: int, turn: int) -> int:
    """No two turns of any two seeds share one, but for the odds of 63 bits."""
    digest = hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class AgentLoop:
    """Runs tasks of one environment on one sampler. Subclass and override `turns` for an agent of your own."""

    def __init__(
        self,
        environment: Environment,
        renderer: Renderer,
        sampler: Sampler,
        limits: RolloutSection,
        on_tools: Callable[[int, bool], None] = lambda lease, busy: None,
    ) -> None:
        """`on_tools(lease, busy)` is called when a trajectory begins and ends to wait for tools."""
        self.environment, self.renderer, self.sampler, self.limits = environment, renderer, sampler, limits
        self._executor = Executor(environment.toolbox, limits.tool_seconds, limits.tools_at_once)
        self._rewards = UserCalls()
        self._beginning = asyncio.Lock()
        self._on_tools = on_tools
        self._running: dict[int, Episode] = {}
        # A template that cannot show this environment's tools or system prompt is refused now, not in every trajectory.
        renderer.start(environment.first_messages(Task(id="", prompt="Hi.")), environment.tools)

    def tokens_in_flight(self, lease: int) -> int:
        """Tokens that a running trajectory sampled so far, in turns that ended."""
        episode = self._running.get(lease)
        return episode.stream.sampled_count if episode else 0

    def tool_use(self) -> list[ToolUse]:
        """Of each tool that was called so far."""
        return [use for use in self._executor.use.values() if use.calls]

    async def run(self, *, lease: int, group: int, task: Task, attempt: int, seed: int, t_leased: float) -> Trajectory:
        episode = Episode(lease, task, seed, self.limits.max_seconds)
        self._running[lease] = episode
        try:
            async with self._executor.session(task) as episode.tools:
                outcome, error = await self._outcome(episode)
            trajectory = self._trajectory(episode, group, attempt, t_leased, outcome)
            if outcome in SCORED:
                error = await self._score(episode, trajectory)
        finally:
            del self._running[lease]
        trajectory.t_done = time.time()
        trajectory.s_wait = max(0.0, time.monotonic() - episode.began - episode.s_generate - episode.s_tool)
        trajectory.detail = detail(episode.messages, error)
        return trajectory

    async def _outcome(self, episode: Episode) -> tuple[Outcome, str]:
        seconds = self.limits.max_seconds
        try:
            async with asyncio.timeout(seconds + GRACE_SECONDS):
                try:
                    async with self._beginning:
                        await asyncio.sleep(0)  # a round of the event loop each: many prompts in a row would stop it
                    return await self.turns(episode), ""
                except Ended as ended:
                    return ended.outcome, ended.why
                except Exception:  # an agent's own fault must not end the rollouter
                    return Outcome.INVALID, traceback.format_exc()
        except TimeoutError:
            return Outcome.TIMEOUT, f"did not end within {seconds:g} s (rollout.max_seconds), and had to be cancelled"

    async def _score(self, episode: Episode, trajectory: Trajectory) -> str:
        """Set the reward, or the outcome and the error to say why there is none."""
        evidence = Evidence(answer=episode.answer, task=episode.task, messages=episode.messages, trajectory=trajectory)
        seconds = max(LEAST_REWARD_SECONDS, episode.seconds_left())
        try:
            scored = await score(self.environment.rewards, evidence, seconds, self._rewards)
        except RewardFailed as failed:
            trajectory.outcome = Outcome.REWARD_FAILED
            return str(failed)
        trajectory.reward, trajectory.reward_parts = scored.total, scored.parts
        return ""

    def _trajectory(self, episode: Episode, group: int, attempt: int, t_leased: float, outcome: Outcome) -> Trajectory:
        stream = episode.stream
        return Trajectory(
            lease=episode.lease,
            group=group,
            task=episode.task.id,
            attempt=attempt,
            token_ids=stream.token_ids,
            sampled=stream.sampled,
            logprobs=stream.logprobs,
            version_runs=stream.version_runs,
            spans=stream.spans,
            outcome=outcome,
            turns=episode.turn,
            tool_calls=episode.tool_calls,
            tool_errors=episode.tool_errors,
            t_leased=t_leased,
            t_first_token=episode.t_first_token,
            s_generate=episode.s_generate,
            s_tool=episode.s_tool,
        )

    # -- the conversation ----------------------------------------------------------------------------------------------

    async def turns(self, episode: Episode) -> Outcome:
        """Sample, run the tools that were called, go on until no tool is called or a budget is out; or what the
        environment's own agent does."""
        self.begin(episode)
        if self.environment.agent is not None:
            return await Conversation(self, episode).hold(self.environment.agent)
        while True:
            finish, calls = await self.say(episode)
            if finish is Finish.LENGTH:
                return Outcome.TRUNCATED_TOKENS  # what was cut is not run
            if not calls:
                return Outcome.FINISHED
            if episode.turn >= self.limits.max_turns:
                return Outcome.TRUNCATED_TURNS
            if self.room(episode) <= 0:
                return Outcome.TRUNCATED_TOKENS
            await self.answer_calls(episode, calls)

    def begin(self, episode: Episode) -> None:
        """The prompt. Ends the trajectory as invalid when the engine has no room for it."""
        episode.messages = self.environment.first_messages(episode.task)
        prompt = self.renderer.start(episode.messages, self.environment.tools)
        most = self.sampler.max_model_len
        if len(prompt) >= most:
            why = f"the prompt has {len(prompt)} tokens, and {most} is all the engine takes (engine.max_model_len)"
            raise Ended(Outcome.INVALID, why)
        episode.stream.append_text(prompt, SpanKind.PROMPT, 0)

    async def say(self, episode: Episode) -> tuple[Finish, list[ToolCall]]:
        """One turn of the model: its tokens to the stream, what it said to the messages."""
        sample = await self._sample(episode)
        episode.stream.append_sample(sample, episode.turn)
        episode.s_generate += sample.seconds
        episode.t_first_token = episode.t_first_token or sample.t_first_token
        parsed = self.renderer.parse(sample.token_ids, self.environment.tools)
        episode.answer = parsed.content
        episode.turn += 1
        said: dict[str, object] = {"role": "assistant", "content": parsed.content}
        if parsed.tool_calls:
            said["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in parsed.tool_calls
            ]
        episode.messages.append(said)
        if sample.finish is Finish.ABORTED:
            if episode.seconds_left() < 0.05:  # timers are that exact
                raise Ended(Outcome.TIMEOUT, f"did not end within {self.limits.max_seconds:g} s (rollout.max_seconds)")
            raise Ended(Outcome.CANCELLED, "the engine aborted the request")
        return sample.finish, parsed.tool_calls

    async def _sample(self, episode: Episode) -> Sample:
        seconds = episode.seconds_left()
        if seconds <= 0:
            raise Ended(Outcome.TIMEOUT, f"did not end within {self.limits.max_seconds:g} s (rollout.max_seconds)")
        request = SampleRequest(
            prompt=episode.stream.token_ids[:],
            max_tokens=self.room(episode),
            stop_token_ids=self.renderer.stop_token_ids,
            temperature=self.limits.temperature,
            seed=turn_seed(episode.seed, episode.turn),
            seconds=seconds,
        )
        try:
            sample = await self.sampler.sample(request)
        except EngineFailed as error:
            raise Ended(Outcome.ENGINE_FAILED, str(error)) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise Ended(Outcome.ENGINE_FAILED, "the engine cancelled the request") from None
        except Exception as error:
            raise Ended(Outcome.ENGINE_FAILED, traceback.format_exc()) from error
        lengths = len(sample.token_ids), len(sample.logprobs), sum(run.length for run in sample.version_runs)
        if len(set(lengths)) > 1:
            raise Ended(Outcome.ENGINE_FAILED, "{} tokens came with {} log-probs, {} versions".format(*lengths))
        if not all(map(math.isfinite, sample.logprobs)):
            raise Ended(Outcome.ENGINE_FAILED, "a sampled token's log-prob is not finite")
        return sample

    def room(self, episode: Episode) -> int:
        """Tokens the next turn may sample: what is left of the trajectory's budget and of the engine's length."""
        budget = self.limits.max_tokens - episode.stream.sampled_count
        return min(budget, self.sampler.max_model_len - len(episode.stream))

    # -- tools ---------------------------------------------------------------------------------------------------------

    async def answer_calls(self, episode: Episode, calls: list[ToolCall]) -> None:
        """Run a turn's calls side by side and append their results, in order, as one rendering."""
        results = await self._run_all(episode, calls)
        episode.tool_calls += len(calls)
        episode.tool_errors += sum(result.error is not None for result in results)
        answers: Messages = []
        for call, result in zip(calls, results, strict=True):
            answer = {
                "role": "tool",
                "name": call.name,
                "content": self.renderer.cut(result.text, self.limits.tool_tokens),
            }
            answers.append({**answer, "tool_call_id": call.id} if call.id else answer)
        episode.messages.extend(answers)
        ids = self.renderer.extend(episode.stream.token_ids, answers, self.environment.tools)
        self._append(episode, ids, SpanKind.TOOL)

    def tell(self, episode: Episode, text: str) -> None:
        """Append a user's message after a sampled turn."""
        message = {"role": "user", "content": text}
        episode.messages.append(message)
        ids = self.renderer.extend(episode.stream.token_ids, [message], self.environment.tools)
        self._append(episode, ids, SpanKind.PROMPT)

    def _append(self, episode: Episode, ids: list[int], kind: SpanKind) -> None:
        if len(episode.stream) + len(ids) >= self.sampler.max_model_len:
            raise Ended(Outcome.TRUNCATED_TOKENS)  # with no room to react to them, they stay out of the stream
        episode.stream.append_text(ids, kind, episode.turn)

    async def _run_all(self, episode: Episode, calls: list[ToolCall]) -> list[ToolResult]:
        began = time.monotonic()
        self._on_tools(episode.lease, True)
        try:
            async with asyncio.timeout(max(0.0, episode.seconds_left())), asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._run_one(episode, call)) for call in calls]
            return [task.result() for task in tasks]
        except TimeoutError:
            names = ", ".join(call.name for call in calls)
            raise Ended(Outcome.TIMEOUT, f"{names} still ran at the deadline (rollout.max_seconds)") from None
        except BaseExceptionGroup as failed:  # of ToolFailed alone: a call raises nothing else
            text = "".join(traceback.format_exception(failed.exceptions[0]))
            raise Ended(Outcome.TOOL_FAILED, text) from None
        finally:
            self._on_tools(episode.lease, False)
            episode.s_tool += time.monotonic() - began

    async def _run_one(self, episode: Episode, call: ToolCall) -> ToolResult:
        if call.problem:
            return ToolResult.failure(ToolError.BAD_CALL, call.problem)
        return await episode.tools.call(call.name, call.arguments)


def detail(messages: Messages, error: str) -> bytes:
    try:
        return msgspec.json.encode(TrajectoryDetail(messages=messages, error=error), enc_hook=str)
    except (ValueError, OverflowError, RecursionError, TypeError) as bad:  # a task's messages that JSON cannot hold
        return msgspec.json.encode(TrajectoryDetail(error=f"{error}\n(messages left out: {bad})".strip()))
