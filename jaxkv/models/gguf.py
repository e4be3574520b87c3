"""Llama checkpoints in GGUF, dequantised to float32 under their Hugging Face names.

Reading a GGUF header takes seconds in Python (every vocabulary entry is a field), so ``index_gguf`` reads it once into
a small JSON object and ``read_indexed`` needs nothing but that and the file.
"""

from pathlib import Path

import numpy as np

from jaxkv.errors import ModelError
from jaxkv.models.checkpoint import Checkpoint, Tensor

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FIELDS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
    "rope_theta": "rope.freq_base",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}


def index_gguf(path: Path) -> dict:
    """The header of a GGUF file: {"config": as in config.json, "tensors": {name: [gguf type, shape, offset, bytes]}}.

    Raises ModelError for a file that is not GGUF and for an architecture other than llama.
    """
    import gguf  # slow to import, and needed once per checkpoint

    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, OSError, IndexError) as error:
        raise ModelError(f"{path} is not a readable GGUF file ({error}); fetch it again") from error

    def field(name: str):
        found = reader.get_field(name)
        return None if found is None else found.contents()

    architecture = field("general.architecture")
    if architecture != "llama":
        raise ModelError(f"{path} holds a GGUF model of architecture {architecture!r}; supported is llama")
    config = {name: field(f"llama.{key}") for name, key in _FIELDS.items()}
    config["model_type"] = "llama"
    # GGUF stores the float32 nearest to the value in config.json; the shortest decimal that rounds to it is that value.
    config["rms_norm_eps"] = float(str(np.float32(config["rms_norm_eps"])))
    config["eos_token_id"] = field("tokenizer.ggml.eos_token_id")
    tensors = {}
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        tensors[tensor.name] = [int(tensor.tensor_type), shape, int(tensor.data_offset), int(tensor.n_bytes)]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    return {"config": config, "tensors": tensors}


def read_indexed(path: Path, index: dict) -> Checkpoint:
    """Describes the tensors of a GGUF file whose header is known; weights are mapped, and dequantised when read."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    config = index["config"]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for name, (kind, shape, offset, size) in index["tensors"].items():
        if offset + size > data.size:
            raise ModelError(f"{path} ends within tensor {name}; it is truncated, fetch it again")
        *prefix, part, suffix = name.split(".")
        if part not in _NAMES:
            raise ModelError(f"{path} holds tensor {name}, which the Llama backbone does not have")
        layer = f"model.layers.{prefix[1]}." if prefix else ""
        read = _reader(data[offset : offset + size], kind, tuple(shape), heads.get(part))
        tensors[f"{layer}{_NAMES[part]}.{suffix}"] = Tensor(tuple(shape), read)
    return Checkpoint(config, tensors, str(path))


def _reader(raw: np.ndarray, kind: int, shape: tuple[int, ...], heads: int | None):
    def read() -> np.ndarray:
        from gguf import GGMLQuantizationType, quants

        rows = raw.reshape(*shape[:-1], -1)
        kind_name = GGMLQuantizationType(kind)
        value = rows.view(np.float32) if kind_name == GGMLQuantizationType.F32 else quants.dequantize(rows, kind_name)
        return np.asarray(value.reshape(shape) if heads is None else unpermute(value.reshape(shape), heads))

    return read


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes GGUF's rotary order in a q or k projection [heads * D, I]: (D/2, 2) pairs become (2, D/2) halves."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(weight.shape)
