"""The real rollouter process with an engine that calls the tool `step` in every turn."""

import math
import sys
import time
from array import array

sys.modules["torch"] = None  # type: ignore[assignment]  # it needs none, and would import it for seconds

from cheap_engine import CheapEngine  # noqa: E402
from tokenizers import pre_tokenizers  # noqa: E402

from slipstream.agent_loop.sampler import Finish, Sample, SampleRequest  # noqa: E402
from slipstream.cli import main  # noqa: E402
from slipstream.rollouter import process  # noqa: E402
from slipstream.trajectory import VersionRun  # noqa: E402

CALL = '<tool_call>{"name":"step","arguments":{}}</tool_call>'
LETTERS = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


class SteppingEngine(CheapEngine):
    async def sample(self, request: SampleRequest) -> Sample:
        ids = array("i", [*(LETTERS[letter] for letter in CALL), request.stop_token_ids[0]])
        self.tokens_generated += len(ids)
        return Sample(
            token_ids=ids,
            logprobs=array("f", [-math.log(256)] * len(ids)),
            version_runs=[VersionRun(len(ids), self.version)],
            finish=Finish.STOP,
            t_first_token=time.time(),
            seconds=0.0,
        )


process.Engine = SteppingEngine  # type: ignore[misc, assignment]

if __name__ == "__main__":
    sys.exit(main())
