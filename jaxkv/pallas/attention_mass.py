"""`attention_mass` as a Pallas Triton kernel.

One program holds, for one row and one KV head, the keys of a block of slots, which may cross from one partition into
the next, and loops over tiles of queries: keys are read once.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jaxkv.ops.layer_kv import DensePart, LayerKV, LowPart
from jaxkv.pallas import triton
from jaxkv.pallas.configs import Config, load_config
from jaxkv.pallas.halves import Halves
from jaxkv.pallas.slots import Queries, SlotTile, grouped, nonempty_parts, read_queries, tile_rows


def attention_mass_triton(
    q: Float[Array, "B T H D"],
    q_position: Int[Array, "B T"],
    lse: Float[Array, "B T H"],
    layer: LayerKV,
    *,
    scale: float,
    window: int | None,
    interpret: bool = False,
    config: Config | None = None,
) -> Float[Array, "B K S"]:
    """See `jaxkv.ops.attention_mass`; `config` overrides the stored block sizes of this device."""
    b, kv_heads, d = q.shape[0], layer.recent.k.shape[1], q.shape[3]
    parts = nonempty_parts(layer)
    slots = sum(part.position.shape[1] for part in parts)
    queries = grouped(q, q_position, lse, kv_heads)
    config = config or load_config("attention_mass", d)
    return triton.launch(
        functools.partial(
            _kernel,
            rows=tile_rows(queries.q.shape[2], config),
            block=config.block_slots,
            scale=scale,
            window=window,
            dtype=jnp.promote_types(q.dtype, layer.recent.k.dtype),
        ),
        [queries, parts],
        grid=(b * kv_heads, pl.cdiv(slots, config.block_slots)),
        out_shape=jax.ShapeDtypeStruct((b, kv_heads, slots), jnp.float32),
        name="jaxkv_attention_mass",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )


def _kernel(
    queries: Queries,
    parts: Sequence[DensePart | LowPart],
    mass_ref: Any,
    *,
    rows: int,
    block: int,
    scale: float,
    window: int | None,
    dtype: Any,
) -> None:
    _, kv_heads, m, head_dim = queries.q.shape
    program = pl.program_id(0)
    row, head = program // kv_heads, program % kv_heads
    halves = Halves(head_dim)
    numbers = pl.program_id(1) * block + jnp.arange(block)
    slots = SlotTile(parts, row, head, numbers, halves, dtype)

    def body(i: Array, mass: Array) -> Array:
        tile = read_queries(queries, row, head, i * rows + jnp.arange(rows), halves, dtype)
        return mass + jnp.sum(slots.probabilities(tile, scale, window), axis=0)

    mass = lax.fori_loop(0, pl.cdiv(m, rows), body, jnp.zeros(block, jnp.float32))
    triton.store(mass_ref.at[row, head, numbers], mass, mask=numbers < mass_ref.shape[2])
