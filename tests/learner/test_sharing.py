"""Beginnings in common are forwarded once: the layout says what it holds, and values and gradients do not change."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_world import VOCABULARY
from torch import Tensor

from slipstream.learner import policy as policy_module
from slipstream.learner.policy import Policy
from slipstream.learner.sharing import LEAST, Layout, shared_layout


def joined(documents: list[list[int]]) -> tuple[Tensor, Tensor]:
    flat = torch.tensor([token for document in documents for token in document], dtype=torch.int32)
    return flat, torch.tensor([0, *(len(document) for document in documents)]).cumsum(0).int()


def past(layout: Layout, segment: int, upto: int) -> list[int]:
    """The tokens that one at place `upto` of its segment may look at, itself included."""
    starts = [0]
    for each in layout.segments:
        starts.append(starts[-1] + each.length)
    ids = layout.token_ids.tolist()
    whole = [token for above in layout.segments[segment].ancestors for token in ids[starts[above] : starts[above + 1]]]
    return whole + ids[starts[segment] : starts[segment] + upto + 1]


@st.composite
def families(draw: st.DrawFn) -> list[list[int]]:
    """Documents that branch off one another anywhere, with copies and empty ones among them."""
    few = st.lists(st.integers(1, 3), max_size=3 * LEAST)
    documents = [draw(few)]
    for _ in range(draw(st.integers(0, 7))):
        root = draw(st.sampled_from(documents))
        documents.append(root[: draw(st.integers(0, len(root)))] + draw(few))
    return draw(st.permutations(documents))


@given(families())
@settings(deadline=None)
def test_every_token_has_the_very_past_of_its_trajectory(documents: list[list[int]]) -> None:
    layout = shared_layout(*joined(documents))
    owner = [(index, at) for index, each in enumerate(layout.segments) for at in range(each.length)]
    places = iter(layout.place.tolist())
    for document in documents:
        for position in range(len(document)):
            place = next(places)
            assert past(layout, *owner[place]) == document[: position + 1]
            assert layout.position_ids[place] == position
    assert next(places, None) is None
    assert set(layout.place.tolist()) == set(range(len(layout.token_ids)))


def test_what_is_worth_it_is_shared_at_every_level() -> None:
    system, one, other = [1] * 40, [2] * 30, [3] * 20
    documents = [system + one + [4], system + one + [5, 5], [7] * 9, system + other + [6], system + other + [7]]
    layout = shared_layout(*joined(documents))
    assert len(layout.token_ids) == 40 + 30 + 20 + 1 + 2 + 1 + 1 + 9
    assert [each.length for each in layout.segments] == [40, 30, 1, 2, 9, 20, 1, 1]
    short = [[1] * (LEAST - 1) + [2], [1] * (LEAST - 1) + [3]]
    assert len(shared_layout(*joined(short)).segments) == 2


@pytest.mark.parametrize("window", [None, 24])
def test_neither_values_nor_gradients_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3}
    MistralForCausalLM(MistralConfig(**shape, **heads, sliding_window=window)).save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(0)

    def some(count: int) -> list[int]:
        return torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()

    system = some(20)
    prompts = [system + some(18), system + some(30)]
    ids, cu_seqlens = joined([prompt + some(length) for prompt in prompts for length in (1, 7, 30)] + [some(5), []])
    wanted = torch.rand(len(ids), generator=generator) < 0.8
    slope = torch.randn(len(ids), generator=generator, dtype=torch.float64)
    found: list[list[Tensor]] = []
    sizes: list[int] = []

    def watched(*arguments: Tensor) -> Layout:
        layout = shared_layout(*arguments)
        sizes.append(len(layout.token_ids))
        return layout

    for least in (LEAST, 10_000):
        monkeypatch.setattr("slipstream.learner.sharing.LEAST", least)
        monkeypatch.setattr(policy_module, "shared_layout", watched)
        policy = Policy(tmp_path, chunk_tokens=64)
        policy.model.double()
        logp, entropy = policy.logprobs(ids, wanted, cu_seqlens, entropy_gradient=True)
        (logp * slope + entropy).sum().backward()
        found.append([logp.detach(), entropy.detach(), *(each.grad for each in policy.parameters())])
    assert sizes[-1] == len(ids) > sizes[1] + 100
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)
