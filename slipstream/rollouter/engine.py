"""One vLLM engine behind the `Sampler` protocol: token ids in; token ids, log-probs and versions out.

Invariant: every sampled token is labelled with the version of the weights that sampled it, and its log-prob is of the
distribution it was sampled from (temperature applied, float32 where the machine computes it).

Weights load in flight: pause (running requests keep their place), load inside the worker, name the version, resume.
New requests wait outside while that happens, so that a request's prefix-cache salt is the version it starts with.
"""

import asyncio
import itertools
import logging
import os
import time
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from slipstream.agent_loop.sampler import EngineFailed, Finish, Sample, SampleRequest
from slipstream.config import EngineSection
from slipstream.queue.messages import Weights
from slipstream.trajectory import VersionRun

if TYPE_CHECKING:
    from vllm.outputs import WeightVersionSpan

log = logging.getLogger(__name__)

# vLLM hands over the first token at once, then in lots of this many: few wake-ups of the event loop, and the time to
# the first token is still known.
STREAM_INTERVAL = 16


class WeightsRejected(Exception):
    """The published weights do not fit the engine, or it does not compute with what was published."""


def prepare_environment(section: EngineSection) -> None:
    """Set what vLLM and OpenMP read from the environment. Must run before torch or vLLM is imported."""
    os.environ["OMP_NUM_THREADS"] = str(section.threads)
    os.environ.update(
        # "auto" binds every engine of the machine to the same first core.
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        VLLM_NO_USAGE_STATS="1",
        # Else the CPU platform turns "uni" into a third process; AsyncLLM has its engine process either way.
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        KMP_BLOCKTIME="0",  # idle OpenMP threads sleep instead of spinning on the learner's core
    )


def choose_dtype(dtype: str) -> str:
    """`auto`: float32 on a CPU, where the learner computes in float32 too and agrees with it to 1e-5 (and where,
    without AVX-512, bfloat16 is some 60 times slower); bfloat16 elsewhere."""
    if dtype != "auto":
        return dtype
    from vllm.platforms import current_platform

    return "float32" if current_platform.is_cpu() else "bfloat16"


class Engine:
    """Start with `Engine.start`; `sample` many times at once; `load` new weights at any time; `shutdown` once."""

    def __init__(self, llm: object, max_model_len: int, on_update: str) -> None:
        self._llm = llm
        self._max_model_len = max_model_len
        self._recompute = on_update == "recompute"
        self._ids = itertools.count()
        self._open = asyncio.Event()
        self._open.set()
        self._loading = asyncio.Lock()
        self.version = -1  # nothing published loaded yet
        self.tokens_generated = 0
        self.running = 0
        self.on_change: Callable[[], None] = lambda: None  # called when the first request begins and the last one ends

    @classmethod
    def start(cls, model: str, dtype: str, section: EngineSection, concurrency: int) -> "Engine":
        """Call inside the event loop, before other threads or sockets exist: on a CPU the engine process is forked."""
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        from slipstream.parent import die_with_parent

        on_cpu = current_platform.is_cpu()
        fork = section.start == "fork" or (section.start == "auto" and on_cpu)
        args = AsyncEngineArgs(
            model=model,
            skip_tokenizer_init=True,
            dtype=choose_dtype(dtype),  # pyright: ignore[reportArgumentType]
            max_model_len=section.max_model_len,
            max_num_seqs=concurrency,
            # A prompt prefilled in parts makes vLLM 0.32 rewind the request's seeded generator, which a CPU one cannot:
            # the engine dies. Whole prompts then, and room for the longest.
            enable_chunked_prefill=not on_cpu,
            max_num_batched_tokens=max(4096, section.max_model_len),
            kv_cache_memory_bytes=section.kv_cache_mb << 20,
            block_size=section.block_size,  # pyright: ignore[reportArgumentType]
            enable_prefix_caching=True,
            enforce_eager=on_cpu,
            distributed_executor_backend="uni",
            logprobs_mode="processed_logprobs",
            max_logprobs=1,
            stream_interval=STREAM_INTERVAL,
            worker_extension_cls="slipstream.rollouter.engine_worker.WorkerExtension",
            disable_log_stats=True,
            enable_log_requests=False,
        )
        vllm_config = args.create_engine_config()
        if fork:  # after create_engine_config: the CPU platform forces spawn there
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
            os.register_at_fork(after_in_child=die_with_parent)
        with set_current_vllm_config(vllm_config):
            llm = AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)
        return cls(llm, section.max_model_len, section.on_update)

    @property
    def dead(self) -> bool:
        return self._llm.errored  # pyright: ignore

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    async def sample(self, request: SampleRequest) -> Sample:
        """Raises EngineFailed. Cancelling the call aborts the request in the engine."""
        await self._open.wait()
        started = time.monotonic()
        self._count(1)
        try:
            return await self._sample(request, started)
        except (asyncio.CancelledError, EngineFailed):
            raise
        except Exception as error:  # vLLM's own kinds: a dead engine, a request it refuses
            raise EngineFailed(f"{type(error).__name__}: {error}") from error
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self.running += change
        if self.running == max(change, 0):
            self.on_change()

    async def _sample(self, request: SampleRequest, started: float) -> Sample:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=True,  # stop tokens come from the template, and from nowhere else
            seed=request.seed % 2**63,
            logprobs=0,  # the sampled token's own, and no others
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        name = f"r{next(self._ids)}"
        prompt = tokens_input(request.prompt.tolist(), cache_salt=f"v{self.version}")
        tokens, logprobs = array("i"), array("f")
        first = 0.0
        spans, finish = None, None
        expiry = asyncio.get_running_loop().call_later(request.seconds, self._abort, name)
        try:
            async for output in self._llm.generate(prompt, params, request_id=name):  # pyright: ignore
                completion = output.outputs[0]
                if completion.token_ids and not first:
                    first = time.time()
                tokens.extend(completion.token_ids)
                if completion.token_ids:
                    logprobs.extend(completion.logprobs.logprobs)
                spans, finish = completion.weight_versions, completion.finish_reason
        finally:
            expiry.cancel()
        self.tokens_generated += len(tokens)
        return Sample(
            token_ids=tokens,
            logprobs=logprobs,
            version_runs=version_runs(spans or [], len(tokens)),
            finish={"stop": Finish.STOP, "length": Finish.LENGTH}.get(finish or "", Finish.ABORTED),
            t_first_token=first or time.time(),
            seconds=time.monotonic() - started,
        )

    def _abort(self, name: str) -> None:
        # A task of the engine's own loop: it ends when the engine acknowledges, and the generator it ends awaits it.
        self._aborting = asyncio.ensure_future(self._llm.abort(name))  # pyright: ignore

    async def serve_as(self, version: int) -> None:
        """Sample with the weights that the engine started with, under this name."""
        await self._llm.update_weight_version(str(version))  # pyright: ignore
        self.version = version

    async def load(self, weights: Weights) -> float:
        """Load published weights in flight; milliseconds that generation stood still.

        Raises WeightsRejected when they do not fit (the engine is untouched) or did not arrive (it must not be used),
        EngineFailed when the engine is gone.
        """
        async with self._loading:
            self._open.clear()
            began = time.perf_counter()
            try:
                await self._llm.pause_generation(mode="keep", clear_cache=self._recompute)  # pyright: ignore
                answers = await self._llm.collective_rpc(  # pyright: ignore
                    "load_published", args=(msgspec.json.encode(weights).decode(),)
                )
                problem = next((answer for answer in answers if answer), "")
                if not problem:
                    await self._llm.update_weight_version(str(weights.version))  # pyright: ignore
                    self.version = weights.version
                await self._llm.resume_generation()  # pyright: ignore
            except Exception as error:  # vLLM's own kinds
                raise EngineFailed(f"loading version {weights.version}: {type(error).__name__}: {error}") from error
            finally:
                self._open.set()
            if problem:
                raise WeightsRejected(f"version {weights.version} from {weights.location}: {problem}")
            return (time.perf_counter() - began) * 1e3

    def shutdown(self) -> None:
        self._llm.shutdown()  # pyright: ignore
        # After shutdown nothing is left for vLLM's destructor to do but to complain while the interpreter exits.
        type(self._llm).__del__ = lambda self: None  # pyright: ignore


def version_runs(spans: "list[WeightVersionSpan]", length: int) -> list[VersionRun]:
    """vLLM's `WeightVersionSpan(version, start, end)` list as runs over exactly `length` tokens."""
    runs = [VersionRun(min(span.end, length) - span.start, int(span.version)) for span in spans if span.start < length]
    covered = sum(run.length for run in runs)
    if covered != length:
        raise EngineFailed(f"the engine labelled {covered} of {length} tokens with a version")
    return [run for run in runs if run.length > 0]
