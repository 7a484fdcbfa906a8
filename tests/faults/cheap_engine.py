"""An engine that costs nothing: random tokens at a steady pace, of whatever weights it was told of last.

What it says is a function of the request's seed, so that tokens of a lease that is granted anew differ, and nothing
else does.
"""

import asyncio
import math
import random
import time
from array import array
from collections.abc import Callable

from slipstream.agent_loop.sampler import Finish, Sample, SampleRequest
from slipstream.config import EngineSection
from slipstream.queue.messages import Weights
from slipstream.trajectory import VersionRun

TOKENS = 256  # bytes; what comes after them in the vocabulary stands for turns
TOKEN_SECONDS = 0.004
LONGEST = 14


class CheapEngine:
    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.version = -1
        self.tokens_generated = 0
        self.running = 0
        self.dead = False
        self.on_change: Callable[[], None] = lambda: None

    @classmethod
    def start(cls, model: str, dtype: str, section: EngineSection, concurrency: int) -> "CheapEngine":
        return cls(section.max_model_len)

    async def sample(self, request: SampleRequest) -> Sample:
        began = time.time()
        self._count(1)
        chance = random.Random(request.seed)
        tokens, runs = array("i"), list[VersionRun]()
        try:
            for _ in range(min(chance.randrange(2, LONGEST), request.max_tokens) - 1):
                await asyncio.sleep(TOKEN_SECONDS)  # weights may come in between
                tokens.append(chance.randrange(TOKENS))
                runs.append(VersionRun(1, self.version))
        finally:
            self._count(-1)
        tokens.append(request.stop_token_ids[0])
        runs.append(VersionRun(1, self.version))
        self.tokens_generated += len(tokens)
        return Sample(
            token_ids=tokens,
            logprobs=array("f", [-math.log(TOKENS)] * len(tokens)),
            version_runs=runs,
            finish=Finish.STOP,
            t_first_token=began,
            seconds=time.time() - began,
        )

    def _count(self, change: int) -> None:
        self.running += change
        self.on_change()

    async def load(self, weights: Weights) -> float:
        await asyncio.sleep(TOKEN_SECONDS)
        self.version = weights.version
        return TOKEN_SECONDS * 1e3

    def shutdown(self) -> None:
        pass
