"""`mixed_attention` as a split-KV Pallas Triton kernel.

One program reads, for one row, one KV head, one tile of queries and one of N splits, its share of every partition, and
leaves the partial (max, sum, unnormalised value) of an online softmax (PASK Eq. 15); XLA merges the N partials.

Routes, by the number M = G T of queries that share a KV head: one (decoding, as many KV heads as query heads) is
multiplied elementwise in float32; GQA-2, GQA-4 and any other group is padded to a tile of 16 rows for the tensor cores;
a chunk of several tokens fills tiles of up to `Config.query_rows`.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jaxkv.ops.layer_kv import LayerKV, LowPart
from jaxkv.ops.partials import MASKED, Partial, group_queries, merge, normalize, ungroup
from jaxkv.pallas import triton
from jaxkv.pallas.configs import Config, load_config, splits_for
from jaxkv.pallas.halves import Halves
from jaxkv.pallas.slots import tile_rows


class _Part(NamedTuple):
    """How the kernel reads one partition: its refs (in argument order), layout, and whether splits share it."""

    low: bool
    token_major: bool
    shared: bool
    slots: int


class _Tile(NamedTuple):
    """Constants of a kernel."""

    rows: int
    block: int
    head_dim: int
    kv_heads: int
    splits: int
    scale: float
    window: int | None
    dtype: Any


def mixed_attention_triton(
    q: Float[Array, "B T H D"],
    layer: LayerKV,
    q_position: Int[Array, "B T"],
    new_kv: tuple[Float[Array, "B T K D"], Float[Array, "B T K D"]] | None,
    sink_logits: Float[Array, "H"] | None,
    *,
    scale: float,
    window: int | None,
    interpret: bool = False,
    config: Config | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """See `jaxkv.ops.mixed_attention`; `config` overrides the stored block sizes of this device."""
    b, t, h, d = q.shape
    kv_heads = layer.recent.k.shape[1]
    grouped = group_queries(q, kv_heads)  # [B, K, M, D]
    m = grouped.shape[2]
    dtype = jnp.promote_types(q.dtype, layer.recent.k.dtype)
    config = config or load_config("mixed_attention" if t == 1 else "mixed_attention_chunk", d, dtype=dtype)
    rows = 1 if m == 1 else tile_rows(m, config)

    arguments: list[Array] = [grouped, jnp.tile(q_position, (1, h // kv_heads))]
    parts: list[_Part] = []
    for part in (layer.high, layer.low, layer.recent):
        slots = part.position.shape[1]
        if not slots:
            continue
        low, shared = isinstance(part, LowPart), part is not layer.recent
        if isinstance(part, LowPart):
            arguments += [part.k_codes, part.v_codes, part.k_scale, part.v_scale]
        else:
            arguments += [part.k, part.v]
        arguments.append(part.position)
        if shared:
            arguments.append(_used(part.position))
        parts.append(_Part(low, False, shared, slots))
    if new_kv is not None:
        arguments += [*new_kv, q_position]
        parts.append(_Part(False, True, False, t))

    tiles = pl.cdiv(m, rows)
    longest = max((part.slots for part in parts if part.shared), default=0)
    splits = splits_for(config, programs=b * kv_heads * tiles, slots=longest)
    tile = _Tile(
        rows=rows,
        block=config.block_slots,
        head_dim=d,
        kv_heads=kv_heads,
        splits=splits,
        scale=scale,
        window=window,
        dtype=dtype,
    )
    shape = (b, kv_heads, splits, m)
    partial = triton.launch(
        functools.partial(_kernel, parts=parts, tile=tile),
        arguments,
        grid=(b * kv_heads, splits, tiles),
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct((*shape, d), jnp.float32),
        ],
        name="jaxkv_mixed_attention",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    merged = merge([Partial(*(x[:, :, split] for x in partial)) for split in range(splits)])
    out, lse = normalize(merged, sink_logits, tokens=t)
    return ungroup(out, t).astype(q.dtype), ungroup(lse, t)


def _used(position: Int[Array, "B S"]) -> Int[Array, "B"]:
    """Slots up to the last occupied one: what lies behind is never read."""
    return jnp.max(jnp.where(position >= 0, jnp.arange(1, position.shape[1] + 1), 0), axis=1).astype(jnp.int32)


def _kernel(*refs: Any, parts: Sequence[_Part], tile: _Tile) -> None:
    q_ref, q_position_ref, *inputs, m_ref, l_ref, u_ref = refs
    program, split, start = pl.program_id(0), pl.program_id(1), pl.program_id(2) * tile.rows
    row, head = program // tile.kv_heads, program % tile.kv_heads
    halves = Halves(tile.head_dim)
    queries = start + jnp.arange(tile.rows)
    real = queries < q_ref.shape[2]
    q = [half.astype(tile.dtype) for half in halves.load(q_ref, (row, head, queries[:, None]), real)]
    q_position = triton.load(q_position_ref.at[row, queries], mask=real, other=-1)
    elementwise = tile.rows == 1

    def score(k: Sequence[Array]) -> Array:
        if elementwise:
            products = [
                jnp.sum(a.astype(jnp.float32)[:, None, :] * x.astype(jnp.float32)[None, :, :], axis=2)
                for a, x in zip(q, k, strict=True)
            ]
        else:
            products = [triton.dot(a, x.astype(tile.dtype).T) for a, x in zip(q, k, strict=True)]
        return products[0] + products[1]

    def weigh(p: Array, half: Array) -> Array:
        if elementwise:
            return jnp.sum(p[:, :, None] * half.astype(jnp.float32)[None, :, :], axis=1)
        return triton.dot(p.astype(tile.dtype), half.astype(tile.dtype))

    def read(ref: Any, part: _Part, slots: Array, valid: Array) -> list[Array]:
        """The two halves of a block's vectors, codes of INT4 as small numbers."""
        index = (row, slots[:, None], head) if part.token_major else (row, head, slots[:, None])
        return halves.load_int4(ref, index, valid) if part.low else halves.load(ref, index, valid)

    def fold(part: _Part, part_refs: Sequence[Any], carry: tuple[Array, ...]) -> tuple[Array, ...]:
        if part.low:
            k_ref, v_ref, k_scale_ref, v_scale_ref, position_ref = part_refs[:5]
        else:
            k_ref, v_ref, position_ref = part_refs[:3]
        if part.shared:
            used = part_refs[-1][row]
            share = pl.cdiv(pl.cdiv(used, tile.splits), tile.block) * tile.block
            first = split * share
            stop = jnp.minimum(first + share, used)
            blocks = pl.cdiv(jnp.maximum(stop - first, 0), tile.block)
        else:
            first, stop = 0, part.slots
            # A product, not jnp.where: Triton lowering takes a choice between the constants 1 and 0 for a boolean.
            blocks = (split == 0).astype(jnp.int32) * pl.cdiv(part.slots, tile.block)

        def body(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            m, l, lower, upper = carry
            slots = first + i * tile.block + jnp.arange(tile.block)
            valid = slots < stop
            position = triton.load(position_ref.at[row, slots], mask=valid, other=-1)
            s = score(read(k_ref, part, slots, valid)) * tile.scale
            if part.low:
                k_scale = triton.load(k_scale_ref.at[row, head, slots], mask=valid, other=0.0)
                s *= k_scale.astype(jnp.float32)[None, :]
            seen = (position >= 0)[None, :] & (position[None, :] <= q_position[:, None])
            if tile.window is not None:
                seen &= position[None, :] > q_position[:, None] - tile.window
            s = jnp.where(seen, s, MASKED)
            top = jnp.maximum(m, jnp.max(s, axis=1))
            p = jnp.where(seen, jnp.exp(s - top[:, None]), 0.0)
            decay = jnp.exp(m - top)
            l = l * decay + jnp.sum(p, axis=1)
            if part.low:
                v_scale = triton.load(v_scale_ref.at[row, head, slots], mask=valid, other=0.0)
                p *= v_scale.astype(jnp.float32)[None, :]
            v = read(v_ref, part, slots, valid)
            return top, l, lower * decay[:, None] + weigh(p, v[0]), upper * decay[:, None] + weigh(p, v[1])

        return lax.fori_loop(0, blocks, body, carry)

    statistic, half = (tile.rows,), (tile.rows, halves.dims.shape[0])
    carry = (
        jnp.full(statistic, MASKED, jnp.float32),
        jnp.zeros(statistic, jnp.float32),
        jnp.zeros(half, jnp.float32),
        jnp.zeros(half, jnp.float32),
    )
    for part in parts:
        count = (5 if part.low else 3) + part.shared
        carry = fold(part, inputs[:count], carry)
        inputs = inputs[count:]

    m, l, *value = carry
    triton.store(m_ref.at[row, head, split, queries], m, mask=real)
    triton.store(l_ref.at[row, head, split, queries], l, mask=real)
    halves.store(u_ref, (row, head, split, queries[:, None]), real, value)
