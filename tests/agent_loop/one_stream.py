"""What trajectories must show whoever led them: each request and each sample is in a branch, once."""

import msgspec
import numpy as np

from slipstream.queue import decode, encode, packed
from slipstream.trajectory import SpanKind


def branches(trajectory) -> list[list[int]]:
    """Token ids of each, as the learner cuts the trajectory."""
    data = packed(decode(encode([trajectory])))
    assert data.cu_seqlens.tolist() == [0, len(trajectory.token_ids)]
    return [part.tolist() for part in np.split(np.array(trajectory.token_ids), data.branches.tolist()[1:-1])]


def said(trajectory) -> list[dict[str, str]]:
    return msgspec.json.decode(trajectory.detail)["messages"]


def each_sample_once(trajectory, sampler) -> None:
    """Every request's prompt, with what was sampled after it, is the beginning of a branch, and no other is sampled."""
    found = branches(trajectory)
    for asked, sample in zip(sampler.requests, sampler.samples, strict=True):
        so_far = [*asked.prompt, *sample.token_ids]
        assert any(branch[: len(so_far)] == so_far for branch in found)
    spans = [trajectory.token_ids[s.start : s.start + s.length] for s in trajectory.spans if s.kind is SpanKind.SAMPLED]
    assert sorted(map(list, spans)) == sorted(list(sample.token_ids) for sample in sampler.samples)
    assert sum(trajectory.sampled) == sum(len(sample.token_ids) for sample in sampler.samples)
    assert sorted(span.turn for span in trajectory.spans if span.kind is SpanKind.SAMPLED) == list(
        range(trajectory.turns)
    )
