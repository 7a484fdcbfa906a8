"""Log-probs of packed trajectories against the model alone: isolation, chunks, temperature, what is refused."""

from pathlib import Path

import pytest
import torch
from learner_world import VOCABULARY
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.errors import UserError
from slipstream.learner.attention import Pieces
from slipstream.learner.packing import position_ids
from slipstream.learner.policy import Policy
from slipstream.learner.sharing import Segment

LENGTHS = [9, 1, 0, 30, 9, 17]


def packed(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (sum(lengths),), generator=generator, dtype=torch.int32)
    return ids, torch.tensor([0, *lengths]).cumsum(0).int()


def alone(folder: Path, ids: torch.Tensor, cu_seqlens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probs of each document by transformers' own forward pass and attention, one document at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found = torch.zeros(len(ids))
    with torch.no_grad():
        for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            if end - start > 1:
                document = ids[start:end].long()
                table = (model(document[None]).logits[0] / temperature).log_softmax(-1)
                found[start + 1 : end] = table[:-1].gather(-1, document[1:, None])[:, 0]
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_equals_each_document_alone(tiny_model: Path, temperature: float) -> None:
    policy = Policy(tiny_model, chunk_tokens=8, temperature=temperature)
    ids, cu_seqlens = packed(LENGTHS)
    found = policy.logprobs(ids, torch.ones(len(ids), dtype=torch.bool), cu_seqlens)
    torch.testing.assert_close(found.logp, alone(tiny_model, ids, cu_seqlens, temperature), atol=1e-5, rtol=0)
    first = cu_seqlens[:-1][cu_seqlens[1:] > cu_seqlens[:-1]].long()
    assert not found.logp[first].any()  # nothing predicts a document's first token


def test_documents_never_see_each_other(tiny_model: Path) -> None:
    """Not by a bit: with other neighbours, the same log-probs and the same gradient."""
    policy = Policy(tiny_model, chunk_tokens=64)
    ids, cu_seqlens = packed(LENGTHS)
    others = packed(LENGTHS, seed=1)[0]
    here = slice(int(cu_seqlens[3]), int(cu_seqlens[4]))
    others[here] = ids[here]
    wanted = torch.zeros(len(ids), dtype=torch.bool)
    wanted[here] = True
    gradients = []
    logps = []
    for each in (ids, others):
        logp = policy.logprobs(each, wanted, cu_seqlens).logp
        logps.append(logp)
        gradients.append(torch.autograd.grad(logp.sum(), policy.model.get_input_embeddings().weight)[0])
    assert logps[0].equal(logps[1])
    assert gradients[0].equal(gradients[1])


def test_sliding_windows_are_those_of_the_model(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3}
    MistralForCausalLM(MistralConfig(**shape, **heads, sliding_window=5)).save_pretrained(tmp_path)
    policy = Policy(tmp_path, chunk_tokens=64)
    ids, cu_seqlens = packed(LENGTHS)
    found = policy.logprobs(ids, torch.ones(len(ids), dtype=torch.bool), cu_seqlens).logp
    torch.testing.assert_close(found, alone(tmp_path, ids, cu_seqlens, 1.0), atol=1e-5, rtol=0)


def test_models_that_would_be_silently_wrong_are_refused(tmp_path: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

    shape = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3}
    GraniteForCausalLM(GraniteConfig(**shape, **heads, logits_scaling=4.0)).save_pretrained(tmp_path / "granite")
    with pytest.raises(UserError, match="does more to its logits than its output head"):
        Policy(tmp_path / "granite", chunk_tokens=8)
    Gemma2ForCausalLM(Gemma2Config(**shape, **heads)).save_pretrained(tmp_path / "gemma")
    with pytest.raises(UserError, match="soft-capping"):
        Policy(tmp_path / "gemma", chunk_tokens=8)


def test_dropout_is_off(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64, resid_pdrop=0.5)
    ).save_pretrained(tmp_path)
    policy = Policy(tmp_path, chunk_tokens=64)
    ids, cu_seqlens = packed(LENGTHS)
    wanted = torch.ones(len(ids), dtype=torch.bool)
    assert policy.logprobs(ids, wanted, cu_seqlens).logp.equal(policy.logprobs(ids, wanted, cu_seqlens).logp)


def test_entropy_is_that_of_the_distribution_sampled_from(tiny_model: Path) -> None:
    policy = Policy(tiny_model, chunk_tokens=4, temperature=0.5)
    ids, cu_seqlens = packed([12])
    wanted = torch.ones(12, dtype=torch.bool)
    found = policy.logprobs(ids, wanted, cu_seqlens).entropy
    with torch.no_grad():
        pieces = Pieces([Segment(0, 12, ())])
        logits = policy.model(ids[None].long(), position_ids=position_ids(cu_seqlens)[None], pieces=pieces)
        entropy = torch.distributions.Categorical(logits=logits.logits[0] / 0.5).entropy()
    torch.testing.assert_close(found[1:], entropy[:-1], atol=1e-5, rtol=0)
    assert not found.requires_grad


def test_chunks_change_neither_values_nor_gradients(tiny_model: Path) -> None:
    found = []
    ids, cu_seqlens = packed(LENGTHS)
    wanted = torch.arange(len(ids)) % 3 > 0
    for chunk in (1, 7, 10_000):
        policy = Policy(tiny_model, chunk_tokens=chunk)
        policy.model.double()
        logp = policy.logprobs(ids, wanted, cu_seqlens).logp
        assert logp.dtype == torch.float64
        (logp * torch.arange(len(ids))).sum().backward()
        found.append([logp.detach(), *(parameter.grad for parameter in policy.parameters())])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-10, rtol=1e-10)
    assert not found[0][0][~wanted].any()


class LargestLogits(TorchDispatchMode):
    """The most rows of any tensor that is as wide as the vocabulary."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] == VOCABULARY:
                self.rows = max(self.rows, tensor.numel() // VOCABULARY)
        return out


@pytest.mark.parametrize("chunk", [4, 32])
def test_no_more_than_a_chunk_of_logits_exists_at_once(tiny_model: Path, chunk: int) -> None:
    policy = Policy(tiny_model, chunk_tokens=chunk)
    ids, cu_seqlens = packed([100, 100])
    wanted = torch.ones(200, dtype=torch.bool)
    with LargestLogits() as seen:
        policy.logprobs(ids, wanted, cu_seqlens).logp.sum().backward()
    # The output head is a table of [hidden, vocabulary] itself.
    assert chunk <= seen.rows <= max(chunk, policy.model.config.hidden_size)


def test_nothing_wanted_costs_nothing(tiny_model: Path) -> None:
    policy = Policy(tiny_model, chunk_tokens=8)
    for lengths in ([5, 3], [0], []):
        ids, cu_seqlens = packed(lengths)
        found = policy.logprobs(ids, torch.zeros(len(ids), dtype=torch.bool), cu_seqlens)
        assert not found.logp.any()
        assert len(found.logp) == len(ids)


def test_saved_folders_are_ordinary(tiny_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = Policy(tiny_model, chunk_tokens=8)
    policy.save(tmp_path, tokenizer_from=tiny_model)
    before, after = load_file(tiny_model / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys() == policy.tensors().keys()  # a tied head is stored once
    assert all(before[name].equal(after[name]) for name in before)
    AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (
        AutoTokenizer.from_pretrained(tmp_path).chat_template == AutoTokenizer.from_pretrained(tiny_model).chat_template
    )
