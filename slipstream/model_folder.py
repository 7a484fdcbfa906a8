"""What a model folder must hold and say for a config to fit it, found out without loading it.

Invariant: only what `config.json` states plainly is held against a config; where a model's memory or length is a matter
of its architecture, the engine has the last word.
"""

from pathlib import Path

import msgspec

from slipstream.config import Config
from slipstream.errors import UserError


class Rope(msgspec.Struct):
    rope_type: str = "default"
    type: str = "default"


class Shape(msgspec.Struct):
    """Of a `config.json`; 0 or None where it does not say."""

    max_position_embeddings: int = 0
    num_hidden_layers: int = 0
    num_key_value_heads: int = 0
    head_dim: int | None = None
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    kv_lora_rank: int | None = None

    @property
    def longest(self) -> int:
        """Tokens in a stream; 0 where scaled positions make it more than is said."""
        ropes = [rope for rope in (self.rope_parameters, self.rope_scaling) if rope]
        scaled = any({rope.rope_type, rope.type} != {"default"} for rope in ropes)
        return 0 if scaled else self.max_position_embeddings

    def kv_bytes(self, itemsize: int) -> int:
        """Of one token, where every layer keeps keys and values of all tokens; else 0."""
        full = self.kv_lora_rank is None and self.sliding_window is None and not set(self.layer_types or ()) - {FULL}
        return 2 * self.num_hidden_layers * self.num_key_value_heads * (self.head_dim or 0) * itemsize * full


FULL = "full_attention"


def check_model(config: Config) -> None:
    """Raises UserError where the folder is not a model's, or the engine's limits do not fit the model."""
    folder, engine = Path(config.model.path), config.engine
    shape = _read(folder)
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"model.path = {str(folder)!r}: there is no .safetensors file; name a folder with the weights")
    if 0 < shape.longest < engine.max_model_len:
        raise UserError(
            f"engine.max_model_len = {engine.max_model_len}: the model takes {shape.longest} tokens "
            f"(max_position_embeddings in its config.json); write at most {shape.longest}"
        )
    itemsize = 4 if config.model.dtype == "float32" else 2
    needed = -(-shape.kv_bytes(itemsize) * engine.max_model_len >> 20)
    if needed > engine.kv_cache_mb:
        raise UserError(
            f"engine.kv_cache_mb = {engine.kv_cache_mb}: one stream of engine.max_model_len = {engine.max_model_len} "
            f"tokens takes {needed} MB; write at least that, or lower engine.max_model_len"
        )


def _read(folder: Path) -> Shape:
    try:
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=Shape)
    except OSError as error:
        raise UserError(
            f"model.path = {str(folder)!r}: there is no config.json; name a Hugging Face model folder"
        ) from error
    except msgspec.DecodeError as error:
        raise UserError(
            f"model.path = {str(folder)!r}: its config.json is no model's ({error}); name a Hugging Face model folder"
        ) from error
