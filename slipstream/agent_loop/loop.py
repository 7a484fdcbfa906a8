"""The agent loop: one task in, one trajectory out, whatever happens in between.

Invariant: `run` returns a Trajectory whose stream holds every token that was sampled, with the outcome that ended it;
only cancellation escapes. In each branch the prompt of turn k+1 is exactly the stream after turn k plus newly rendered
tokens.
"""

import asyncio
import math
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from slipstream.agent_loop import parking
from slipstream.agent_loop.calls import ToolCall
from slipstream.agent_loop.chat import lead
from slipstream.agent_loop.ended import ContextFull, Ended
from slipstream.agent_loop.environment import Environment
from slipstream.agent_loop.episode import Branch, Episode
from slipstream.agent_loop.parking import CannotGoOn
from slipstream.agent_loop.renderer import Renderer
from slipstream.agent_loop.sampler import EngineFailed, Finish, Sample, Sampler, SampleRequest
from slipstream.agent_loop.text import Messages
from slipstream.config import RolloutSection
from slipstream.rewards import Evidence, RewardFailed, score
from slipstream.task import Task
from slipstream.tools import Executor, Shown, ToolError, ToolResult
from slipstream.tooluse import ToolUse
from slipstream.trajectory import Outcome, SpanKind, Trajectory, TrajectoryDetail
from slipstream.usercall import UserCalls

if TYPE_CHECKING:
    from slipstream.agent_loop.endpoint.door import Door

SCORED = frozenset({Outcome.FINISHED, Outcome.TRUNCATED_TOKENS, Outcome.TRUNCATED_TURNS})
# The engine and the tools keep to the deadline themselves; past it by this much, the trajectory is ended from outside.
GRACE_SECONDS = 10.0
LEAST_REWARD_SECONDS = 10.0  # for the rewards of a trajectory that ended close to its deadline


class AgentLoop:
    """Runs tasks of one environment on one sampler. Subclass and override `turns` for an agent of your own."""

    def __init__(
        self,
        environment: Environment,
        renderer: Renderer,
        sampler: Sampler,
        limits: RolloutSection,
        on_tools: Callable[[int, bool], None] = lambda lease, busy: None,
        on_park: Callable[[Trajectory], None] | None = None,
    ) -> None:
        """`on_tools(lease, busy)` is called when a trajectory begins and ends to wait for tools; `on_park` with how far
        one has come, between two turns, every rollout.park_seconds."""
        self.environment, self.renderer, self.sampler, self.limits = environment, renderer, sampler, limits
        self._executor = Executor(environment.toolbox, limits.tool_seconds, limits.tools_at_once)
        self._rewards = UserCalls()
        self._beginning = asyncio.Lock()
        self._on_tools = on_tools
        self._on_park = on_park if limits.park_seconds and environment.agent is None else None
        self._door: Door | None = None
        self._running: dict[int, Episode] = {}
        # A template that cannot show this environment's tools or system prompt is refused now, not in every trajectory.
        renderer.start(environment.first_messages(Task(id="", prompt="Hi.")), environment.tools)

    def door(self) -> "Door":
        """Where agents of any make come in over HTTP; opened when the first one is served."""
        if self._door is None:
            from slipstream.agent_loop.endpoint.door import Door

            self._door = Door(self)
        return self._door

    async def close(self) -> None:
        """Once, when no trajectory runs any more."""
        if self._door is not None:
            await self._door.close()

    def tokens_in_flight(self, lease: int) -> int:
        """Tokens that a running trajectory sampled so far, in turns that ended."""
        episode = self._running.get(lease)
        return episode.sampled_count if episode else 0

    def tool_use(self) -> list[ToolUse]:
        """Of each tool that was called so far."""
        return [use for use in self._executor.use.values() if use.calls]

    async def run(
        self,
        *,
        lease: int,
        group: int,
        task: Task,
        attempt: int,
        seed: int,
        t_leased: float,
        parked: Trajectory | None = None,
    ) -> Trajectory:
        """`parked`: how far another came with it. Raises CannotGoOn, with nothing sampled yet, where that is no use."""
        episode = Episode(lease, task, seed, self.limits.max_seconds)
        episode.group, episode.attempt, episode.t_leased = group, attempt, t_leased
        episode.park_at = episode.began + self.limits.park_seconds
        self._running[lease] = episode
        try:
            async with self._executor.session(task) as episode.tools:
                if parked is not None:
                    if self._on_park is None:
                        raise CannotGoOn("rollout.park_seconds is 0, or the environment has an agent of its own")
                    await parking.go_on(episode, parked, self.environment.tools)
                outcome, error = await self._outcome(episode)
            trajectory = self._trajectory(episode, outcome)
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

    async def _park(self, episode: Episode) -> None:
        """Where it is time to, and the state of the tools can be had."""
        if self._on_park is None or time.monotonic() < episode.park_at:
            return
        episode.park_at = time.monotonic() + self.limits.park_seconds
        if (tools := await episode.tools.save()) is None:
            return
        parked = self._trajectory(episode, Outcome.CANCELLED)
        parked.detail = parking.detail(episode, tools)
        if parked.detail is not None:
            self._on_park(parked)

    def _trajectory(self, episode: Episode, outcome: Outcome) -> Trajectory:
        stream = episode.stream()
        return Trajectory(
            lease=episode.lease,
            group=episode.group,
            task=episode.task.id,
            attempt=episode.attempt,
            token_ids=stream.token_ids,
            sampled=stream.sampled,
            logprobs=stream.logprobs,
            version_runs=stream.version_runs,
            spans=stream.spans,
            outcome=outcome,
            turns=episode.turn,
            tool_calls=episode.tool_calls,
            tool_errors=episode.tool_errors,
            t_leased=episode.t_leased,
            t_first_token=episode.t_first_token,
            s_generate=episode.s_generate,
            s_tool=episode.s_tool,
        )

    # -- the conversation ----------------------------------------------------------------------------------------------

    async def turns(self, episode: Episode) -> Outcome:
        """Sample, run the tools that were called, go on until no tool is called or a budget is out; or what the
        environment's own agent does."""
        branch = episode.branches[0] if episode.branches else self.begin(episode)  # a parked one has begun
        if self.environment.agent is not None:
            return await lead(self, branch, self.environment.agent)
        while True:
            finish, calls = await self.say(branch)
            if finish is Finish.LENGTH:
                return Outcome.TRUNCATED_TOKENS  # what was cut is not run
            if not calls:
                return Outcome.FINISHED
            if episode.turn >= self.limits.max_turns:
                return Outcome.TRUNCATED_TURNS
            if self.room(branch) <= 0:
                return Outcome.TRUNCATED_TOKENS
            await self.answer_calls(branch, calls)
            await self._park(episode)

    def begin(self, episode: Episode) -> Branch:
        """The task's own conversation. Ends the trajectory as invalid when the engine has no room for its prompt."""
        try:
            return self.branch(episode, self.environment.first_messages(episode.task), self.environment.tools)
        except ContextFull as full:
            raise Ended(Outcome.INVALID, full.why) from full

    def branch(self, episode: Episode, messages: Messages, tools: Sequence[Shown]) -> Branch:
        """A conversation that begins with these messages. Raises ContextFull."""
        branch = Branch(episode, tools, [])
        branch.add(messages)
        prompt = self.renderer.start(messages, tools)
        most = self.sampler.max_model_len
        if len(prompt) >= most:
            raise ContextFull(
                f"the prompt has {len(prompt)} tokens, and {most} is all the engine takes (engine.max_model_len)"
            )
        branch.stream.append_text(prompt, SpanKind.PROMPT, episode.turn)
        return branch

    async def say(self, branch: Branch, most: int | None = None) -> tuple[Finish, list[ToolCall]]:
        """One turn of the model, of at most so many tokens: its tokens to the stream, what it said to the messages."""
        episode = branch.episode
        sample = await self._sample(branch, most)
        branch.stream.append_sample(sample, episode.turn)
        episode.s_generate += sample.seconds
        episode.t_first_token = episode.t_first_token or sample.t_first_token
        parsed = self.renderer.parse(sample.token_ids, branch.tools)
        episode.answer = parsed.content
        episode.turn += 1
        said: dict[str, object] = {"role": "assistant", "content": parsed.content}
        if parsed.tool_calls:
            said["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in parsed.tool_calls
            ]
        branch.add([said])
        if sample.finish is Finish.ABORTED:
            if episode.seconds_left() < 0.05:  # timers are that exact
                raise self._late()
            raise Ended(Outcome.CANCELLED, "the engine aborted the request")
        return sample.finish, parsed.tool_calls

    def _late(self) -> Ended:
        return Ended(Outcome.TIMEOUT, f"did not end within {self.limits.max_seconds:g} s (rollout.max_seconds)")

    async def _sample(self, branch: Branch, most: int | None) -> Sample:
        episode = branch.episode
        seconds = episode.seconds_left()
        if seconds <= 0:
            raise self._late()
        room = self.room(branch)
        request = SampleRequest(
            prompt=branch.stream.token_ids[:],
            max_tokens=room if most is None else min(room, most),
            stop_token_ids=self.renderer.stop_token_ids,
            temperature=self.limits.temperature,
            seed=episode.next_seed(),
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

    def budget(self, episode: Episode) -> int:
        """Tokens that the trajectory may still sample, in all its branches."""
        return self.limits.max_tokens - episode.sampled_count

    def room(self, branch: Branch) -> int:
        """Tokens the next turn may sample: what is left of the trajectory's budget and of the engine's length."""
        return min(self.budget(branch.episode), self.sampler.max_model_len - len(branch.stream))

    # -- tools ---------------------------------------------------------------------------------------------------------

    async def answer_calls(self, branch: Branch, calls: list[ToolCall]) -> None:
        """Run a turn's calls side by side and append their results, in order, as one rendering. Raises ContextFull."""
        episode = branch.episode
        results = await self._run_all(branch, calls)
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
        self.append(branch, answers, SpanKind.TOOL)

    def append(self, branch: Branch, messages: Messages, kind: SpanKind) -> None:
        """Messages of a user or of tools after a sampled turn. Raises ContextFull."""
        branch.add(messages)
        ids = self.renderer.extend(branch.stream.token_ids, messages, branch.tools)
        most = self.sampler.max_model_len
        if len(branch.stream) + len(ids) >= most:  # with no room to react to them, they stay out of the stream
            raise ContextFull(
                f"{len(branch.stream)} tokens and {len(ids)} new ones; {most} is all the engine takes "
                "(engine.max_model_len)"
            )
        branch.stream.append_text(ids, kind, branch.episode.turn)

    async def _run_all(self, branch: Branch, calls: list[ToolCall]) -> list[ToolResult]:
        episode = branch.episode
        began = time.monotonic()
        self._on_tools(episode.lease, True)
        try:
            async with asyncio.timeout(max(0.0, episode.seconds_left())), asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._run_one(branch, call)) for call in calls]
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

    async def _run_one(self, branch: Branch, call: ToolCall) -> ToolResult:
        if call.problem:
            return ToolResult.failure(ToolError.BAD_CALL, call.problem)
        if call.name not in (names := [each.name for each in branch.tools]):
            known = ", ".join(names) or "none"
            return ToolResult.failure(ToolError.UNKNOWN_TOOL, f"there is no tool {call.name!r}; there are: {known}")
        return await branch.episode.tools.call(call.name, call.arguments)


def detail(messages: Messages, error: str) -> bytes:
    try:
        return msgspec.json.encode(TrajectoryDetail(messages=messages, error=error), enc_hook=str)
    except (ValueError, OverflowError, RecursionError, TypeError) as bad:  # a task's messages that JSON cannot hold
        return msgspec.json.encode(TrajectoryDetail(error=f"{error}\n(messages left out: {bad})".strip()))
