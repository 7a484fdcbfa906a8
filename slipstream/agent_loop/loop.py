"""The agent loop: one task in, one trajectory out, whatever happens in between.

Invariant: `run` returns a Trajectory whose stream holds every token that was sampled, with the outcome that ended it;
only cancellation escapes. The prompt of turn k+1 is exactly the stream after turn k plus newly rendered tokens.
"""

import asyncio
import time
import traceback
from collections.abc import Callable

import msgspec

from slipstream.agent_loop.calls import ToolCall
from slipstream.agent_loop.environment import Environment
from slipstream.agent_loop.renderer import Messages, Renderer
from slipstream.agent_loop.sampler import EngineFailed, Finish, Sample, Sampler, SampleRequest
from slipstream.agent_loop.stream import TokenStream
from slipstream.config import RolloutSection
from slipstream.rewards import Evidence, RewardFailed, score
from slipstream.task import Task
from slipstream.tools import Executor, ToolFailed, ToolResult
from slipstream.trajectory import Outcome, SpanKind, Trajectory, TrajectoryDetail

SCORED = frozenset({Outcome.FINISHED, Outcome.TRUNCATED_TOKENS, Outcome.TRUNCATED_TURNS})
# A turn's seed is the trajectory's plus its number times this odd constant, so that no two turns share one.
TURN_STRIDE = 0x9E3779B97F4A7C15


class Episode:
    """The state of one attempt while it runs."""

    def __init__(self, lease: int, task: Task, seed: int, deadline: float) -> None:
        self.lease, self.task, self.seed, self.deadline = lease, task, seed, deadline
        self.stream = TokenStream()
        self.messages: Messages = []
        self.answer = ""
        self.turn = 0
        self.tool_calls = 0
        self.tool_errors = 0
        self.t_first_token = 0.0
        self.s_generate = 0.0
        self.s_tool = 0.0

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()


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
        self._executor = Executor(environment.tools, limits.tool_seconds)
        self._on_tools = on_tools
        self._running: dict[int, Episode] = {}

    def tokens_in_flight(self, lease: int) -> int:
        """Sampled tokens, turns that ended, of a running trajectory."""
        episode = self._running.get(lease)
        return episode.stream.sampled_count if episode else 0

    async def run(self, *, lease: int, group: int, task: Task, attempt: int, seed: int, t_leased: float) -> Trajectory:
        began = time.monotonic()
        episode = Episode(lease, task, seed, began + self.limits.max_seconds)
        self._running[lease] = episode
        try:
            outcome, error = await self._outcome(episode)
            total, parts = None, {}
            if outcome in SCORED:
                try:
                    evidence = Evidence(answer=episode.answer, task=task, messages=episode.messages)
                    scored = await score(self.environment.rewards, evidence, self.limits.max_seconds)
                    total, parts = scored.total, scored.parts
                except RewardFailed as failed:
                    outcome, error = Outcome.REWARD_FAILED, str(failed)
        finally:
            del self._running[lease]
        stream = episode.stream
        return Trajectory(
            lease=lease,
            group=group,
            task=task.id,
            attempt=attempt,
            token_ids=stream.token_ids,
            sampled=stream.sampled,
            logprobs=stream.logprobs,
            version_runs=stream.version_runs,
            spans=stream.spans,
            outcome=outcome,
            reward=total,
            reward_parts=parts,
            turns=episode.turn,
            tool_calls=episode.tool_calls,
            tool_errors=episode.tool_errors,
            t_leased=t_leased,
            t_first_token=episode.t_first_token,
            t_done=time.time(),
            s_generate=episode.s_generate,
            s_tool=episode.s_tool,
            s_wait=max(0.0, time.monotonic() - began - episode.s_generate - episode.s_tool),
            detail=msgspec.json.encode(TrajectoryDetail(messages=episode.messages, error=error), enc_hook=str),
        )

    async def _outcome(self, episode: Episode) -> tuple[Outcome, str]:
        try:
            # The engine and the tools keep to the deadline themselves; this is for an agent that does not.
            async with asyncio.timeout(self.limits.max_seconds + 10):
                return await self.turns(episode), ""
        except TimeoutError:
            return Outcome.TIMEOUT, f"did not end within {self.limits.max_seconds:g} s (rollout.max_seconds)"
        except EngineFailed as error:
            return Outcome.ENGINE_FAILED, str(error)
        except ToolFailed as error:
            return Outcome.TOOL_FAILED, f"{error}"
        except Exception:  # an agent's own fault must not end the rollouter
            return Outcome.INVALID, traceback.format_exc()

    async def turns(self, episode: Episode) -> Outcome:
        """The conversation: sample, run the tools that were called, go on until no tool is called or a budget is out."""
        tools = self.environment.tools
        episode.messages = self.environment.first_messages(episode.task)
        prompt = self.renderer.start(episode.messages, tools)
        episode.stream.append_text(prompt, SpanKind.PROMPT, 0)
        if len(prompt) >= self.sampler.max_model_len:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, the engine takes {self.sampler.max_model_len} in all "
                "(engine.max_model_len)"
            )
        while True:
            sample = await self.sample(episode)
            parsed = self.renderer.parse(sample.token_ids, tools)
            episode.answer = parsed.content
            said: dict[str, object] = {"role": "assistant", "content": parsed.content}
            if parsed.calls:
                said["tool_calls"] = [
                    {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                    for call in parsed.calls
                ]
            episode.messages.append(said)
            episode.turn += 1
            if sample.finish is Finish.ABORTED:
                raise TimeoutError
            if sample.finish is Finish.LENGTH:
                return Outcome.TRUNCATED_TOKENS  # what was cut is not run
            if not parsed.calls:
                return Outcome.FINISHED
            if episode.turn >= self.limits.max_turns:
                return Outcome.TRUNCATED_TURNS
            await self.answer_calls(episode, parsed.calls)
            if self._room(episode) <= 0:
                return Outcome.TRUNCATED_TOKENS

    async def sample(self, episode: Episode) -> Sample:
        """One turn from the engine, appended to the stream."""
        stream = episode.stream
        sample = await self.sampler.sample(
            SampleRequest(
                prompt=stream.token_ids,
                max_tokens=self._room(episode),
                stop_token_ids=self.renderer.stop_token_ids,
                temperature=self.limits.temperature,
                seed=(episode.seed + episode.turn * TURN_STRIDE) % 2**63,
                seconds=max(0.01, episode.seconds_left()),
            )
        )
        stream.append_sample(sample, episode.turn)
        episode.s_generate += sample.seconds
        episode.t_first_token = episode.t_first_token or sample.t_first_token
        return sample

    def _room(self, episode: Episode) -> int:
        """Tokens the next turn may sample: what is left of the trajectory's budget and of the engine's length."""
        budget = self.limits.max_tokens - episode.stream.sampled_count
        return min(budget, self.sampler.max_model_len - len(episode.stream))

    async def answer_calls(self, episode: Episode, calls: list[ToolCall]) -> None:
        """Run a turn's calls side by side and append their results, in order, as one rendering."""
        began = time.monotonic()
        self._on_tools(episode.lease, True)
        try:
            async with asyncio.timeout(max(0.01, episode.seconds_left())):
                results = await self._run_all(calls)
        finally:
            self._on_tools(episode.lease, False)
            episode.s_tool += time.monotonic() - began
        episode.tool_calls += len(calls)
        episode.tool_errors += sum(result.error for result in results)
        answers: Messages = [
            {"role": "tool", "name": call.name, "content": self.renderer.cut(result.text, self.limits.tool_tokens)}
            for call, result in zip(calls, results, strict=True)
        ]
        episode.messages.extend(answers)
        ids = self.renderer.extend(episode.stream.token_ids, answers, self.environment.tools)
        episode.stream.append_text(ids, SpanKind.TOOL, episode.turn)

    async def _run_all(self, calls: list[ToolCall]) -> list[ToolResult]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._run_one(call)) for call in calls]
        except* ToolFailed as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _run_one(self, call: ToolCall) -> ToolResult:
        if call.problem:
            return ToolResult(f"Error: {call.problem}", True)
        return await self._executor.call(call.name, call.arguments)
