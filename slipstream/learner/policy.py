"""The model being trained: log-probabilities of packed trajectories.

Invariant: the log-prob of token t stands at index t (it comes from the logits at t-1), is of the distribution sampled
from (logits / temperature), and no more than `chunk_tokens` rows of logits exist at once: forward keeps hidden states
only, and backward computes each chunk's logits again.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slipstream.learner.attention import choose_attention
from slipstream.learner.packing import lengths_of, position_ids


class TokenLogprobs(NamedTuple):
    """[T] each; 0 where not asked for. `entropy` carries no gradient."""

    logp: Tensor
    entropy: Tensor


class Policy:
    """A Hugging Face causal language model, with its log-probs over the packed layout."""

    def __init__(self, folder: str | Path, *, chunk_tokens: int, temperature: float = 1.0) -> None:
        from transformers import AutoModelForCausalLM

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, attn_implementation=choose_attention(self.device)
        ).to(self.device)
        self.model.train()
        self._chunk, self._temperature = chunk_tokens, temperature

    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def logprobs(self, token_ids: Tensor, wanted: Tensor, cu_seqlens: Tensor) -> TokenLogprobs:
        """token_ids int [T], wanted bool [T], cu_seqlens int32 [N+1]. A trajectory's first token has no log-prob."""
        hidden = self._hidden(token_ids, cu_seqlens)
        first = torch.zeros_like(wanted)
        starts = cu_seqlens[:-1][lengths_of(cu_seqlens) > 0].long()
        first[starts] = True
        at = torch.nonzero(wanted & ~first)[:, 0]
        head = self.model.get_output_embeddings()
        logps, entropies = [], []
        for chunk in at.split(self._chunk):
            logp, entropy = checkpoint(  # pyright: ignore[reportGeneralTypeIssues]
                _head, head, hidden[chunk - 1], token_ids[chunk].long(), self._temperature, use_reentrant=False
            )
            logps.append(logp)
            entropies.append(entropy)
        empty = torch.zeros(len(token_ids), dtype=hidden.dtype, device=hidden.device)
        if not logps:
            return TokenLogprobs(empty + 0 * hidden.sum(), empty)
        return TokenLogprobs(
            empty.index_copy(0, at, torch.cat(logps)), empty.index_copy(0, at, torch.cat(entropies).detach())
        )

    def _hidden(self, token_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """[T, hidden]: after the last norm, before the output head."""
        longest = int(lengths_of(cu_seqlens).max())
        return self.model.base_model(
            token_ids.long()[None],
            position_ids=position_ids(cu_seqlens)[None],
            use_cache=False,
            cu_seq_lens_q=cu_seqlens,
            cu_seq_lens_k=cu_seqlens,
            max_length_q=longest,
            max_length_k=longest,
        ).last_hidden_state[0]

    def tensors(self) -> dict[str, Tensor]:
        """Named as in a Hugging Face folder, each once (a tied head is the embedding), detached."""
        named: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in self.model.state_dict().items():
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                named[name] = tensor.detach()
        return named

    def save(self, folder: Path, tokenizer_from: str | Path) -> None:
        """An ordinary Hugging Face folder with the tokenizer and template that were trained on."""
        from transformers import AutoTokenizer

        self.model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(str(tokenizer_from)).save_pretrained(folder)


def _head(head: torch.nn.Module, hidden: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float() / temperature if hidden.dtype != torch.float64 else head(hidden) / temperature
    normalizer = logits.logsumexp(-1)
    logp = logits.gather(-1, token_ids[:, None])[:, 0] - normalizer
    with torch.no_grad():
        probabilities = (logits - normalizer[:, None]).exp()
        entropy = normalizer - (probabilities * logits).sum(-1)
    return logp, entropy
