"""The model being trained: log-probabilities of packed trajectories.

Invariant: the log-prob of token t stands at index t (it comes from the logits at t-1), is of the distribution sampled
from (logits / temperature, no dropout), and no more than `chunk_tokens` rows of logits exist at once.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from slipstream.errors import UserError
from slipstream.learner.attention import FLASH, Pieces, choose_attention
from slipstream.learner.forward import Forward, square_cost
from slipstream.learner.norms import speed_up_norms
from slipstream.learner.packing import lengths_of, position_ids
from slipstream.learner.sharding import shard, whole
from slipstream.learner.sharing import shared_layout


class TokenLogprobs(NamedTuple):
    """[T] each; 0 where not asked for."""

    logp: Tensor
    entropy: Tensor


class Policy:
    """A Hugging Face causal language model, with its log-probs over the packed layout."""

    def __init__(
        self, folder: str | Path, *, chunk_tokens: int, temperature: float = 1.0, mesh: DeviceMesh | None = None
    ) -> None:
        """With a `mesh`, sharded over its ranks: then all of them make the same calls, in the same order."""
        from transformers import AutoModelForCausalLM

        self.mesh = mesh
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        attention = choose_attention(self.device)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, attn_implementation=attention
        )
        self.model.eval()  # dropout would make log-probs differ from the engine's; gradients do not mind
        self._flash = attention == FLASH  # it has no float32: bfloat16 autocast; weights and the head stay float32
        self._chunk, self._temperature = chunk_tokens, temperature
        self.square = square_cost(self.model)
        if self.device.type == "cpu":
            speed_up_norms(self.model)
        self._forward: Any = Forward(self.model, torch.bfloat16 if self._flash else None)
        if mesh is None:
            self.model.to(self.device)
        else:
            shard(self._forward, self.model, mesh)
        self._prove_head(folder)

    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def logprobs(
        self, token_ids: Tensor, wanted: Tensor, cu_seqlens: Tensor, *, entropy_gradient: bool = False
    ) -> TokenLogprobs:
        """token_ids int [T], wanted bool [T], cu_seqlens int32 [N+1] of the sequences, each with a past of its own. The
        first token of one has no log-prob."""
        first = torch.zeros_like(wanted)
        first[cu_seqlens[:-1][lengths_of(cu_seqlens) > 0].long()] = True
        at = torch.nonzero(wanted & ~first)[:, 0]
        dtype = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        empty = torch.zeros(len(token_ids), dtype=dtype, device=self.device)
        if not len(at) and self.mesh is None:  # else the other ranks wait for this one's part
            return TokenLogprobs(empty, empty)
        arguments, place = self._packed(token_ids, cu_seqlens)
        logp, entropy = self._forward(
            arguments, place[at - 1], token_ids[at].long(), temperature=self._temperature, chunk=self._chunk
        )
        entropy = entropy if entropy_gradient else entropy.detach()
        return TokenLogprobs(empty.index_copy(0, at, logp), empty.index_copy(0, at, entropy))

    def _packed(self, token_ids: Tensor, cu_seqlens: Tensor) -> tuple[dict[str, Any], Tensor]:
        """What transformers is told of the packed layout, and where each token of it then is."""
        if not self._flash:
            layout = shared_layout(token_ids, cu_seqlens)
            tokens, positions = layout.token_ids, layout.position_ids
            more: dict[str, Any] = {"pieces": Pieces(layout.segments)}
            place = layout.place
        else:
            tokens, positions = token_ids.long(), position_ids(cu_seqlens)
            longest = int(lengths_of(cu_seqlens).max())
            more = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
            more |= {"max_length_q": longest, "max_length_k": longest}
            place = torch.arange(len(tokens), device=self.device)
        return {"input_ids": tokens[None], "position_ids": positions[None], "use_cache": False, **more}, place

    @torch.no_grad()
    def _prove_head(self, folder: str | Path) -> None:
        """Some families scale or cap logits after the head; theirs would be silently wrong log-probs."""
        ids = torch.arange(8, device=self.device) % self.model.config.get_text_config().vocab_size
        cu_seqlens = torch.tensor([0, len(ids)], dtype=torch.int32, device=self.device)
        arguments, place = self._packed(ids, cu_seqlens)
        ours, theirs = self._forward(arguments, place, prove=True)
        if not torch.allclose(ours, theirs, rtol=1e-1 if self._flash else 1e-4, atol=1e-1 if self._flash else 1e-4):
            raise UserError(
                f"model.path = {str(folder)!r}: {type(self.model).__name__} does more to its logits than its output "
                f"head (up to {float((ours - theirs).abs().max()):.2g} apart); choose a family without logit scaling"
            )

    def parts(self) -> dict[str, Tensor]:
        """Named as in a Hugging Face folder, each once (a tied head is the embedding), detached; of a sharded one, this
        rank's part."""
        again = dict(self.model.named_parameters(remove_duplicate=False)).keys() - dict(self.model.named_parameters())
        return {name: tensor.detach() for name, tensor in self.model.state_dict().items() if name not in again}

    def tensors(self) -> dict[str, Tensor]:
        """`parts`, but whole; by all ranks together."""
        return {name: whole(tensor) for name, tensor in self.parts().items()}

    def save(self, folder: Path, tokenizer_from: str | Path) -> None:
        """An ordinary Hugging Face folder with the tokenizer and template that were trained on."""
        from transformers import AutoTokenizer

        self.model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(str(tokenizer_from)).save_pretrained(folder)
