"""`deletion_effect` as a Pallas Triton kernel.

One program takes, for one row, one KV head, one page and one tile of queries, the page's slots by their numbers, from
whichever partition each lies in, `Config.block_slots` at a time. A page is short, so it is padded to a tile of the
tensor cores.
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


def deletion_effect_triton(
    q: Float[Array, "B T H D"],
    q_position: Int[Array, "B T"],
    lse: Float[Array, "B T H"],
    layer: LayerKV,
    page_slots: Int[Array, "B P G"],
    *,
    scale: float,
    window: int | None,
    interpret: bool = False,
    config: Config | None = None,
) -> tuple[Float[Array, "B P H T"], Float[Array, "B P H T D"]]:
    """See `jaxkv.ops.deletion_effect`; `config` overrides the stored block sizes of this device."""
    b, t, h, d = q.shape
    kv_heads, pages = layer.recent.k.shape[1], page_slots.shape[1]
    queries = grouped(q, q_position, lse, kv_heads)
    m = queries.q.shape[2]
    config = config or load_config("deletion_effect", d)
    rows = tile_rows(m, config)
    s, u = triton.launch(
        functools.partial(
            _kernel,
            rows=rows,
            block=config.block_slots,
            scale=scale,
            window=window,
            dtype=jnp.promote_types(q.dtype, layer.recent.k.dtype),
        ),
        [queries, page_slots, nonempty_parts(layer)],
        grid=(b * kv_heads, pages, pl.cdiv(m, rows)),
        out_shape=[
            jax.ShapeDtypeStruct((b, pages, kv_heads, m), jnp.float32),
            jax.ShapeDtypeStruct((b, pages, kv_heads, m, d), jnp.float32),
        ],
        name="jaxkv_deletion_effect",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    return s.reshape(b, pages, h, t), u.reshape(b, pages, h, t, d)


def _kernel(
    queries: Queries,
    page_slots_ref: Any,
    parts: Sequence[DensePart | LowPart],
    s_ref: Any,
    u_ref: Any,
    *,
    rows: int,
    block: int,
    scale: float,
    window: int | None,
    dtype: Any,
) -> None:
    _, kv_heads, _, head_dim = queries.q.shape
    program, page, start = pl.program_id(0), pl.program_id(1), pl.program_id(2) * rows
    row, head = program // kv_heads, program % kv_heads
    halves = Halves(head_dim)
    tile = read_queries(queries, row, head, start + jnp.arange(rows), halves, dtype)
    size = page_slots_ref.shape[2]

    def body(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        index = i * block + jnp.arange(block)
        numbers = triton.load(page_slots_ref.at[row, page, index], mask=index < size, other=-1)
        slots = SlotTile(parts, row, head, numbers, halves, dtype)
        a = slots.probabilities(tile, scale, window)
        s, lower, upper = carry
        more = slots.weigh(a)
        return s + jnp.sum(a, axis=1), lower + more[0], upper + more[1]

    half = (rows, halves.dims.shape[0])
    zeros = (jnp.zeros(rows, jnp.float32), jnp.zeros(half, jnp.float32), jnp.zeros(half, jnp.float32))
    s, *u = lax.fori_loop(0, pl.cdiv(size, block), body, zeros)
    triton.store(s_ref.at[row, page, head, tile.index], s, mask=tile.real)
    halves.store(u_ref, (row, page, head, tile.index[:, None]), tile.real, u)
