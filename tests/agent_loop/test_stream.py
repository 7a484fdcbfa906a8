from array import array

from hypothesis import given
from hypothesis import strategies as st

from slipstream.agent_loop.sampler import Finish, Sample
from slipstream.agent_loop.stream import TokenStream
from slipstream.trajectory import SpanKind, VersionRun

texts = st.lists(st.integers(0, 99), max_size=5)
runs = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=4)


@given(st.lists(st.one_of(texts, runs.map(tuple)), max_size=8))
def test_every_field_covers_the_stream(pieces):
    stream, ids, versions = TokenStream(), [], []
    for turn, piece in enumerate(pieces):
        if isinstance(piece, list):
            stream.append_text(piece, SpanKind.TOOL, turn)
            ids += piece
            versions += [-1] * len(piece)
            continue
        count = sum(length for length, _ in piece)
        sample = Sample(
            token_ids=array("i", [7] * count),
            logprobs=array("f", [-1.0] * count),
            version_runs=[VersionRun(*run) for run in piece],
            finish=Finish.STOP,
            t_first_token=0.0,
            seconds=0.0,
        )
        stream.append_sample(sample, turn)
        ids += [7] * count
        versions += [version for length, version in piece for _ in range(length)]
    assert stream.token_ids.tolist() == ids
    assert [run.version for run in stream.version_runs for _ in range(run.length)] == versions
    assert all(a.version != b.version for a, b in zip(stream.version_runs, stream.version_runs[1:], strict=False))
    assert list(stream.sampled) == [int(version >= 0) for version in versions]
    assert stream.logprobs.tolist() == [-1.0 if version >= 0 else 0.0 for version in versions]
    assert stream.sampled_count == sum(stream.sampled)
    covered = [at for span in stream.spans for at in range(span.start, span.start + span.length)]
    assert covered == list(range(len(stream)))
