"""The append-only token stream of one trajectory.

Invariant: tokens are only ever appended. Text is rendered once, when it enters; sampled tokens are kept as sampled,
never decoded and encoded again. All per-token fields have the same length, and the version runs cover it exactly.
"""

from array import array

from slipstream.agent_loop.sampler import Sample
from slipstream.trajectory import Span, SpanKind, VersionRun

NOT_SAMPLED = -1


class TokenStream:
    """Token ids with, for each position: sampled or not, log-prob, version (as runs), and who wrote it (as spans)."""

    def __init__(self) -> None:
        self.token_ids: array[int] = array("i")
        self.sampled = bytearray()
        self.logprobs: array[float] = array("f")
        self.version_runs: list[VersionRun] = []
        self.spans: list[Span] = []
        self.sampled_count = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    def append_text(self, token_ids: list[int], kind: SpanKind, turn: int) -> None:
        """Tokens that the policy did not sample."""
        count = len(token_ids)
        self._span(kind, turn, count)
        self.token_ids.extend(token_ids)
        self.sampled.extend(bytes(count))
        self.logprobs.extend([0.0] * count)
        self.add_run(count, NOT_SAMPLED)

    def append_sample(self, sample: Sample, turn: int) -> None:
        count = len(sample.token_ids)
        self._span(SpanKind.SAMPLED, turn, count)
        self.token_ids.extend(sample.token_ids)
        self.sampled.extend(b"\x01" * count)
        self.logprobs.extend(sample.logprobs)
        for run in sample.version_runs:
            self.add_run(run.length, run.version)
        self.sampled_count += count

    def _span(self, kind: SpanKind, turn: int, count: int) -> None:
        if count:
            self.spans.append(Span(kind, turn, len(self.token_ids), count))

    def add_run(self, count: int, version: int) -> None:
        if count and self.version_runs and self.version_runs[-1].version == version:
            count += self.version_runs.pop().length
        if count:
            self.version_runs.append(VersionRun(count, version))


def end_to_end(streams: list[TokenStream]) -> TokenStream:
    """Streams one behind the other. What the first begins with is a prompt, what each other does is a branch.

    >>> one, other = TokenStream(), TokenStream()
    >>> one.append_text([5, 6], SpanKind.BRANCH, 0)
    >>> other.append_text([7], SpanKind.PROMPT, 0)
    >>> [(span.kind.value, span.start) for span in end_to_end([one, other]).spans]
    [('prompt', 0), ('branch', 2)]
    """
    whole = TokenStream()
    for stream in streams:
        begin, kind = len(whole), SpanKind.BRANCH if len(whole) else SpanKind.PROMPT
        whole.token_ids.extend(stream.token_ids)
        whole.sampled.extend(stream.sampled)
        whole.logprobs.extend(stream.logprobs)
        for run in stream.version_runs:
            whole.add_run(run.length, run.version)
        for span in stream.spans:
            moved = Span(kind if not span.start else span.kind, span.turn, begin + span.start, span.length)
            whole.spans.append(moved)
        whole.sampled_count += stream.sampled_count
    return whole
