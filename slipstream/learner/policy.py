"""The model being trained: log-probabilities of packed trajectories.

Invariant: the log-prob of token t stands at index t (it comes from the logits at t-1), is of the distribution sampled
from (logits / temperature, no dropout), and no more than `chunk_tokens` rows of logits exist at once: forward keeps
hidden states only, and backward computes each chunk's logits again.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slipstream.errors import UserError
from slipstream.learner.attention import FLASH, choose_attention
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
        attention = choose_attention(self.device)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, attn_implementation=attention
        )
        self.model.to(self.device)
        self.model.eval()  # dropout would make log-probs differ from the engine's; gradients do not mind
        self._half = attention == FLASH  # flash attention has no float32; weights and the head keep it
        self._chunk, self._temperature = chunk_tokens, temperature
        self._prove_head(folder)

    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def logprobs(self, token_ids: Tensor, wanted: Tensor, cu_seqlens: Tensor) -> TokenLogprobs:
        """token_ids int [T], wanted bool [T], cu_seqlens int32 [N+1]. A trajectory's first token has no log-prob."""
        first = torch.zeros_like(wanted)
        first[cu_seqlens[:-1][lengths_of(cu_seqlens) > 0].long()] = True
        at = torch.nonzero(wanted & ~first)[:, 0]
        dtype = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        empty = torch.zeros(len(token_ids), dtype=dtype, device=self.device)
        if not len(at):
            return TokenLogprobs(empty, empty)
        hidden = self._hidden(token_ids, cu_seqlens).to(dtype)
        head = self.model.get_output_embeddings()
        logps: list[Tensor] = []
        entropies: list[Tensor] = []
        for chunk in at.split(self._chunk):
            logp, entropy = checkpoint(  # pyright: ignore[reportGeneralTypeIssues]
                _head, head, hidden[chunk - 1], token_ids[chunk].long(), self._temperature, use_reentrant=False
            )
            logps.append(logp)
            entropies.append(entropy)
        return TokenLogprobs(
            empty.index_copy(0, at, torch.cat(logps)), empty.index_copy(0, at, torch.cat(entropies).detach())
        )

    def _hidden(self, token_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """[T, hidden]: after the last norm, before the output head."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._half):
            return self.model.base_model(token_ids.long()[None], **_bounds(cu_seqlens)).last_hidden_state[0]

    @torch.no_grad()
    def _prove_head(self, folder: str | Path) -> None:
        """Some families scale or cap logits after the head; theirs would be silently wrong log-probs."""
        ids = torch.arange(8, device=self.device) % self.model.config.get_text_config().vocab_size
        cu_seqlens = torch.tensor([0, len(ids)], dtype=torch.int32, device=self.device)
        ours = self.model.get_output_embeddings()(self._hidden(ids, cu_seqlens).float())
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._half):
            theirs = self.model(ids[None], **_bounds(cu_seqlens)).logits[0].float()
        if not torch.allclose(ours, theirs, rtol=1e-1 if self._half else 1e-4, atol=1e-1 if self._half else 1e-4):
            raise UserError(
                f"model.path = {str(folder)!r}: {type(self.model).__name__} does more to its logits than its output "
                f"head (up to {float((ours - theirs).abs().max()):.2g} apart); choose a family without logit scaling"
            )

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


def _bounds(cu_seqlens: Tensor) -> dict[str, Any]:
    """What transformers is told of the packed layout."""
    longest = int(lengths_of(cu_seqlens).max())
    return {
        "position_ids": position_ids(cu_seqlens)[None],
        "use_cache": False,
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _head(head: torch.nn.Module, hidden: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = head(hidden) / temperature
    normalizer = logits.logsumexp(-1)
    logp = logits.gather(-1, token_ids[:, None])[:, 0] - normalizer
    with torch.no_grad():
        probabilities = (logits - normalizer[:, None]).exp()
        entropy = normalizer - (probabilities * logits).sum(-1)
    return logp, entropy
