"""Memory of one decode step of a published model, read off the compiled program: nothing is allocated.

The program is the engine's own `forward`, lowered with abstract parameters and state.
"""

import contextlib
import dataclasses
import time
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxkv.engine.steps import forward
from jaxkv.evaluation.figures import Figure
from jaxkv.models.llama import Llama, LlamaConfig
from jaxkv.pallas.gates import compiling_for
from jaxkv.state.kv_state import KVState, allocated_bytes, init_state
from jaxkv.state.payload import KVSpec, group_costs

# Shapes of the published config.json files. Qwen3's norms of queries and keys are left out: they hold no cache.
SHAPES: Final = {
    "qwen3-4b": LlamaConfig(36, 2560, 9728, 32, 8, 128, 151_936, 262_144, tie_embeddings=True),
    "qwen3-14b": LlamaConfig(40, 5120, 17_408, 40, 8, 128, 151_936, 40_960),
    "llama-3.1-8b": LlamaConfig(32, 4096, 14_336, 32, 8, 128, 128_256, 131_072),
    "smollm2-135m": LlamaConfig(30, 576, 1536, 9, 3, 64, 49_152, 8192, tie_embeddings=True),
}
WINDOW: Final = 16
SINKS: Final = 4


@dataclasses.dataclass(frozen=True)
class AbstractModel:
    """What a decode step needs of a model: its shapes."""

    config: LlamaConfig

    @property
    def attention_scale(self) -> float:
        return self.config.attention_scale

    def forward(
        self, params: Any, tokens: Array, positions: Array, attend: Any, *, select: Array | None = None
    ) -> Array:
        logits: Any = Llama(self.config).apply({"params": params}, tokens, positions, attend, select)
        return logits


def decode_memory(
    config: LlamaConfig, *, rows: int, tokens: int, high: float, low: float, target: str = "cpu"
) -> dict[str, Figure]:
    """Compile a decode step and read its memory.

    Args:
      rows, tokens: rows of the batch, and tokens that each has seen.
      high, low: shares of the tokens at full precision and in INT4; the rest is released.
      target: "cpu", where parameters and full-precision partitions are float32 (XLA's CPU backend computes bfloat16 by
        way of float32 copies); or a CUDA architecture of `jaxkv.pallas.targets.COMPILED`, where they are bfloat16: it
        need not be present, but the extra `aot` must.

    Returns:
      payload_ratio (scheduled payload of these shares over Full KV's); state_bytes (all arrays of the state, padding
      included); full_bytes (Full KV in the same dtype, no padding); state_over_full, and bfloat16_state_over_full (the
      same where the full-precision partitions are bfloat16); temporary_bytes; temporaries_over_state; aliased_bytes;
      all_state_aliased (every array of the state is updated in place); compile_seconds.
    """
    spec = KVSpec(config.num_layers, config.num_kv_heads, config.head_dim)

    def abstract_state(dtype: str) -> KVState:
        slots = {"high_slots": round(high * tokens), "low_slots": round(low * tokens)}
        return jax.eval_shape(lambda: init_state(spec, rows=rows, window=WINDOW, sinks=SINKS, dtype=dtype, **slots))

    def full(dtype: str) -> int:
        return rows * tokens * 2 * config.num_layers * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize

    dtype = "float32" if target == "cpu" else "bfloat16"
    config = dataclasses.replace(config, dtype=dtype)
    state = abstract_state(dtype)
    one = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    params = jax.eval_shape(
        lambda key, x: Llama(config).init(key, x, x, lambda layer, q, k, v: q), jax.random.key(0), one
    )["params"]
    began = time.perf_counter()
    step = (params, state, jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.bool_))
    with contextlib.nullcontext(lambda x: x) if target == "cpu" else compiling_for(target) as place:
        lowered = forward.lower(AbstractModel(config), *place(step))
    memory: Any = lowered.compile().memory_analysis()
    costs = group_costs(spec)
    state_bytes = allocated_bytes(state)
    return {
        "payload_ratio": (high * sum(costs.high) + low * sum(costs.low)) / costs.full,
        "state_bytes": state_bytes,
        "full_bytes": full(dtype),
        "state_over_full": state_bytes / full(dtype),
        "bfloat16_state_over_full": allocated_bytes(abstract_state("bfloat16")) / full("bfloat16"),
        "temporary_bytes": memory.temp_size_in_bytes,
        "temporaries_over_state": memory.temp_size_in_bytes / state_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "all_state_aliased": memory.alias_size_in_bytes >= state_bytes,
        "compile_seconds": time.perf_counter() - began,
    }
