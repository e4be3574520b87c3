"""Llama backbone: Llama 2 and 3.x, DeepSeek-R1-Distill-Llama, SmolLM2.

The module knows nothing of KV state. It computes rotated queries, rotated keys and values of a layer and hands them to
``attend``, which the engine supplies; layers are unrolled, so ``attend`` sees the layer as a Python int.
"""

import dataclasses
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.errors import ModelError
from jaxkv.models import layers
from jaxkv.models.layers import Linear, RMSNorm, RopeScaling, SwiGLU, apply_rope, parse_rope, project, rope_angles

DTYPES = ("float32", "bfloat16")


class Attend(Protocol):
    """Attention of one layer over whatever the caller keeps: q [B, T, H, D], k and v [B, T, K, D] -> [B, T, H, D]."""

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, /) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama model. ``context`` counts positions; ``dtype`` is that of parameters and activations."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_eps: float = 1e-5
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "float32"

    def __post_init__(self):
        for name in (
            "num_layers",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "vocab_size",
            "context",
        ):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}; rotary embedding needs an even width")
        if self.dtype not in DTYPES:
            raise ModelError(f"dtype {self.dtype!r} is not supported; choose {' or '.join(DTYPES)}")

    @classmethod
    def from_hf(cls, config: dict, dtype: str = "float32") -> "LlamaConfig":
        """Reads a Hugging Face ``config.json``. Raises ModelError for missing fields and unsupported features."""
        names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        missing = [name for name in (*names, "max_position_embeddings") if config.get(name) is None]
        if missing:
            raise ModelError(f"config.json lacks {', '.join(missing)}; take the checkpoint's own config.json")
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise ModelError(f"hidden_act {activation!r} is not supported by the Llama backbone; supported is silu")
        heads = int(config["num_attention_heads"])
        theta, scaling = parse_rope(config)
        return cls(
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            vocab_size=int(config["vocab_size"]),
            context=int(config["max_position_embeddings"]),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            dtype=dtype,
        )

    @property
    def attention_scale(self) -> float:
        """Factor of the attention scores, 1 / sqrt(head_dim)."""
        return self.head_dim**-0.5

    @property
    def rope_frequencies(self) -> np.ndarray:
        """Inverse rotary frequencies, float32 [head_dim / 2]."""
        return layers.rope_frequencies(self.head_dim, self.rope_theta, self.rope_scaling)

    def tensors(self) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
        """Every tensor of the checkpoint: Hugging Face name -> (path in the parameter tree, shape)."""
        hidden, ffn = self.hidden_size, self.intermediate_size
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        found: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
            "model.embed_tokens.weight": (("embed", "weight"), (self.vocab_size, hidden)),
            "model.norm.weight": (("norm", "weight"), (hidden,)),
        }
        if not self.tie_embeddings:
            found["lm_head.weight"] = (("head", "weight"), (self.vocab_size, hidden))
        linears = {
            "self_attn.q_proj": (("attention", "q"), (q_width, hidden), self.attention_bias),
            "self_attn.k_proj": (("attention", "k"), (kv_width, hidden), self.attention_bias),
            "self_attn.v_proj": (("attention", "v"), (kv_width, hidden), self.attention_bias),
            "self_attn.o_proj": (("attention", "o"), (hidden, q_width), self.attention_bias),
            "mlp.gate_proj": (("mlp", "gate"), (ffn, hidden), self.mlp_bias),
            "mlp.up_proj": (("mlp", "up"), (ffn, hidden), self.mlp_bias),
            "mlp.down_proj": (("mlp", "down"), (hidden, ffn), self.mlp_bias),
        }
        for layer in range(self.num_layers):
            here, prefix = f"layer_{layer}", f"model.layers.{layer}."
            found[prefix + "input_layernorm.weight"] = ((here, "attention_norm", "weight"), (hidden,))
            found[prefix + "post_attention_layernorm.weight"] = ((here, "mlp_norm", "weight"), (hidden,))
            for name, (path, shape, bias) in linears.items():
                found[f"{prefix}{name}.weight"] = ((here, *path, "weight"), shape)
                if bias:
                    found[f"{prefix}{name}.bias"] = ((here, *path, "bias"), shape[:1])
        return found


class Attention(nn.Module):
    """Projections and rotation around an attention that is computed elsewhere."""

    config: LlamaConfig
    layer: int

    @nn.compact
    def __call__(self, x: Float[Array, "B T I"], cos: jax.Array, sin: jax.Array, attend: Any) -> Float[Array, "B T I"]:
        config = self.config
        batch, time, hidden = x.shape

        def heads(name: str, count: int) -> jax.Array:
            flat = Linear(count * config.head_dim, config.attention_bias, name=name)(x)
            return flat.reshape(batch, time, count, config.head_dim)  # [B, T, H or K, D]

        q = apply_rope(heads("q", config.num_heads), cos, sin)
        k = apply_rope(heads("k", config.num_kv_heads), cos, sin)
        out = attend(self.layer, q, k, heads("v", config.num_kv_heads))
        flat = out.reshape(batch, time, config.num_heads * config.head_dim)
        return Linear(hidden, config.attention_bias, name="o")(flat.astype(x.dtype))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    config: LlamaConfig
    layer: int

    @nn.compact
    def __call__(self, x: Float[Array, "B T I"], cos: jax.Array, sin: jax.Array, attend: Any) -> Float[Array, "B T I"]:
        config = self.config
        normed = RMSNorm(config.rms_eps, name="attention_norm")(x)
        x = x + Attention(config, self.layer, name="attention")(normed, cos, sin, attend)
        normed = RMSNorm(config.rms_eps, name="mlp_norm")(x)
        return x + SwiGLU(config.intermediate_size, config.mlp_bias, name="mlp")(normed)


class Embedding(nn.Module):
    """Token table [V, I] that also serves as a tied head."""

    config: LlamaConfig

    def setup(self):
        shape = (self.config.vocab_size, self.config.hidden_size)
        self.weight = self.param("weight", nn.initializers.normal(0.02), shape, jnp.dtype(self.config.dtype))

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T I"]:
        return jnp.take(self.weight, tokens, axis=0)

    def logits(self, x: Float[Array, "B T I"]) -> Float[Array, "B T V"]:
        return project(self.weight, x, jnp.dtype(jnp.float32))


class Llama(nn.Module):
    """Decoder-only Llama: tokens [B, T] and absolute positions [B, T] -> float32 logits."""

    config: LlamaConfig

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Any,
        select: Int[Array, "B"] | None = None,
        capture: list | None = None,
    ) -> Float[Array, "B T V"] | Float[Array, "B V"]:
        """Logits of every token [B, T, V], or with ``select`` those of token ``select[b]`` of row b alone [B, V].

        ``capture`` receives, at trace time, the embedding and the hidden state after each layer: num_layers + 1 arrays
        [B, T, I], the last one before the final norm.
        """
        config = self.config
        embed = Embedding(config, name="embed")
        cos, sin = rope_angles(positions, config.rope_frequencies)
        x = embed(tokens)
        if capture is not None:
            capture.append(x)
        for layer in range(config.num_layers):
            x = Block(config, layer, name=f"layer_{layer}")(x, cos, sin, attend)
            if capture is not None:
                capture.append(x)
        if select is not None:
            x = jnp.take_along_axis(x, select[:, None, None], axis=1)  # [B, 1, I]
        x = RMSNorm(config.rms_eps, name="norm")(x)
        head = embed if config.tie_embeddings else Embedding(config, name="head")
        logits = head.logits(x)
        return logits if select is None else logits[:, 0]
