"""Decoding with `mixed_attention` as a split-KV Pallas Mosaic GPU kernel for Hopper.

One program, a warpgroup, reads for one row, one KV head and one of N splits its share of every partition, and leaves
the partial (max, sum, unnormalised value) of an online softmax (PASK Eq. 15); XLA merges the N partials. Blocks of
slots come to shared memory by TMA, the next one while this one is multiplied. INT4 is unpacked there: the low codes of
its bytes are the left half of a vector, the high codes the right half. The queries of a KV head are padded to the 64
rows of a `wgmma`.

It has been checked by interpreting, lowering and compiling it, and never been run or timed on a GPU, so it runs only
when it is asked for. The interpreter knows `wgmma` of two operands in shared memory into a new accumulator, and nothing
else: therefore the softmax's weights pass through shared memory, and values are added up outside of `wgmma`.
"""

import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jaxkv.errors import KernelError
from jaxkv.ops.layer_kv import DensePart, LayerKV, LowPart
from jaxkv.ops.partials import MASKED, Partial, group_queries, merge, normalize, ungroup
from jaxkv.pallas import mosaic_gpu
from jaxkv.pallas.configs import Config, architecture, load_config
from jaxkv.pallas.mosaic_gpu import plgpu

BLOCK: Final = 64  # slots that a program reads at a time


class _Tile(NamedTuple):
    """Constants of a kernel."""

    rows: int  # queries of a KV head, padded to the 8 rows of a tile
    head_dim: int
    stages: int  # blocks in flight
    scale: float
    window: int | None
    dtype: Any

    @property
    def swizzle(self) -> int:
        return mosaic_gpu.swizzle(self.head_dim // 2)


def mixed_attention_mosaic_gpu(
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
    """See `jaxkv.ops.mixed_attention`; `config` overrides this device's number of stages and of programs.

    Raises:
      KernelError: it cannot run, and why.
    """
    b, t, _, d = q.shape
    kv_heads = layer.recent.k.shape[1]
    if reason := _obstacle(q, layer, interpret):
        name = "mosaic_gpu_interpret" if interpret else "mosaic_gpu"
        raise KernelError(f"mixed_attention: implementation '{name}' cannot run: {reason}; use 'xla' or None")

    grouped = group_queries(q, kv_heads)  # [B, K, M, D]
    m = grouped.shape[2]
    rows = pl.cdiv(m, 8) * 8
    config = config or load_config("mixed_attention", d)
    tail = _tail(layer.recent, new_kv, q_position)
    shared = [part for part in (layer.high, layer.low) if part.position.shape[1]]
    blocks = max((pl.cdiv(part.position.shape[1], BLOCK) for part in shared), default=1)
    splits = max(1, min(pl.cdiv(config.programs, b * kv_heads), blocks // 2))

    arguments: list[Array] = [jnp.pad(grouped, ((0, 0), (0, 0), (0, rows - m), (0, 0))), q_position[:, 0]]
    for part in (*shared, tail):
        arguments += [*_arrays(part), *_schedule(part.position, splits, shared=part is not tail)]
    tile = _Tile(rows, d, config.num_stages, scale, window, q.dtype)
    shape = (b, kv_heads, splits, rows)
    partial = mosaic_gpu.launch(
        functools.partial(_kernel, low=[isinstance(part, LowPart) for part in (*shared, tail)], tile=tile),
        arguments,
        grid={"row": b, "head": kv_heads, "split": splits},
        out_type=[
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct((*shape, d), jnp.float32),
        ],
        scratch_types=[mosaic_gpu.tiled((mosaic_gpu.ROWS, d), q.dtype, tile.swizzle), plgpu.Barrier()],
        name="jaxkv_mixed_attention_mosaic",
        interpret=interpret,
    )
    merged = merge([Partial(*(x[:, :, split, :m] for x in partial)) for split in range(splits)])
    out, lse = normalize(merged, sink_logits, tokens=t)
    return ungroup(out, t).astype(q.dtype), ungroup(lse, t)


def _obstacle(q: Array, layer: LayerKV, interpret: bool) -> str | None:
    _, t, h, d = q.shape
    if t != 1:
        return f"it decodes single tokens and was given {t}"
    return mosaic_gpu.obstacle(
        interpret=interpret,
        on=architecture(),
        head_dim=d,
        rows=h // layer.recent.k.shape[1],
        dtypes=[q.dtype, layer.high.k.dtype, layer.recent.k.dtype],
    )


def _tail(recent: DensePart, new_kv: tuple[Array, Array] | None, position: Int[Array, "B 1"]) -> DensePart:
    """The ring and the new token: a few dozen slots, cheaper copied together than read apart."""
    if new_kv is None:
        return recent
    k, v = (x.swapaxes(1, 2).astype(recent.k.dtype) for x in new_kv)
    return DensePart(
        jnp.concatenate([recent.k, k], axis=2),
        jnp.concatenate([recent.v, v], axis=2),
        jnp.concatenate([recent.position, position], axis=1),
    )


def _arrays(part: DensePart | LowPart) -> list[Array]:
    """What the kernel reads of a partition, in whole blocks: capacities that are not get copied."""
    slots = part.position.shape[1]

    def whole(x: Array, axis: int, empty: int = 0) -> Array:
        missing = [(0, -slots % BLOCK if i == axis else 0) for i in range(x.ndim)]
        return x if slots % BLOCK == 0 else jnp.pad(x, missing, constant_values=empty)

    position = whole(part.position, 1, -1)
    if isinstance(part, LowPart):
        return [*(whole(x, 2) for x in (part.k_codes, part.v_codes, part.k_scale, part.v_scale)), position]
    return [whole(part.k, 2), whole(part.v, 2), position]


def _schedule(position: Int[Array, "B S"], splits: int, *, shared: bool) -> tuple[Int[Array, "B N"], Int[Array, "B N"]]:
    """The first block of each split and their number, up to the last occupied slot; unshared: the first reads."""
    used = jnp.max(jnp.where(position >= 0, jnp.arange(1, position.shape[1] + 1), 0), axis=1, keepdims=True)
    blocks = pl.cdiv(used, BLOCK)
    share = pl.cdiv(blocks, splits) if shared else blocks
    first = jnp.arange(splits) * share
    return first.astype(jnp.int32), jnp.clip(blocks - first, 0, share).astype(jnp.int32)


def _kernel(*refs: Any, low: Sequence[bool], tile: _Tile) -> None:
    q_ref, q_position_ref, *inputs, m_ref, l_ref, u_ref, queries, barrier = refs
    row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
    # Rows of `queries` beyond `tile.rows` stay garbage, as do theirs of the result, which nobody reads.
    plgpu.copy_gmem_to_smem(q_ref.at[row, head], queries.at[pl.ds(0, tile.rows)], barrier)
    plgpu.barrier_wait(barrier)
    q_position = q_position_ref[row]

    carry = (
        mosaic_gpu.by_row(jnp.full((mosaic_gpu.ROWS,), MASKED, jnp.float32)),
        mosaic_gpu.by_row(jnp.zeros((mosaic_gpu.ROWS,), jnp.float32)),
        mosaic_gpu.accumulator(jnp.zeros((mosaic_gpu.ROWS, tile.head_dim), jnp.float32)),
    )
    for is_low in low:
        count = 5 if is_low else 3
        sources = [ref.at[row] if len(ref.shape) == 2 else ref.at[row, head] for ref in inputs[:count]]
        first, blocks = (ref[row, split] for ref in inputs[count : count + 2])
        inputs = inputs[count + 2 :]
        carry = _fold(sources, first, blocks, carry, queries, q_position, tile)

    m, l, u = carry

    def store(m_buffer: Any, l_buffer: Any, u_buffer: Any) -> None:
        m_buffer[...] = m
        l_buffer[...] = l
        u_buffer[...] = u
        plgpu.commit_smem()
        for buffer, ref in ((m_buffer, m_ref), (l_buffer, l_ref), (u_buffer, u_ref)):
            plgpu.copy_smem_to_gmem(buffer.at[pl.ds(0, tile.rows)], ref.at[row, head, split])
        plgpu.wait_smem_to_gmem(0)

    statistic = plgpu.SMEM((mosaic_gpu.ROWS,), jnp.float32)
    pl.run_scoped(store, statistic, statistic, mosaic_gpu.tiled((mosaic_gpu.ROWS, tile.head_dim), jnp.float32, 128))


def _fold(
    sources: Sequence[Any],
    first: Array,
    blocks: Array,
    carry: tuple[Array, ...],
    queries: Any,
    q_position: Array,
    tile: _Tile,
) -> tuple[Array, ...]:
    """Add `blocks` blocks of one partition, from block `first` on, to the carried softmax."""
    low = len(sources) == 5
    width = tile.head_dim // 2
    vectors = functools.partial(mosaic_gpu.tiled, dtype=tile.dtype, size=tile.swizzle)

    def loop(buffers: Sequence[Any], arrived: Any, weights: Any, unpacked: Sequence[Any]) -> tuple[Array, ...]:
        def fetch(i: Array | int) -> None:
            slot = lax.rem(i, tile.stages)
            for source, buffer in zip(sources, buffers, strict=True):
                plgpu.copy_gmem_to_smem(source.at[pl.ds((first + i) * BLOCK, BLOCK)], buffer.at[slot], arrived.at[slot])

        def body(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            ahead = i + (tile.stages - 1)
            pl.when(ahead < blocks)(lambda: fetch(ahead))
            slot = lax.rem(i, tile.stages)
            plgpu.barrier_wait(arrived.at[slot])
            *arrays, position_buffer = [buffer.at[slot] for buffer in buffers]
            if low:
                for codes, vector in zip(arrays, unpacked, strict=False):
                    _unpack(codes, vector, width)
                plgpu.commit_smem()
                k, v = unpacked
                k_scale, v_scale = (mosaic_gpu.by_column(x[...]).astype(jnp.float32) for x in arrays[2:])
            else:
                k, v = arrays
                k_scale = v_scale = None

            s = mosaic_gpu.dot(queries, k.T, BLOCK) * tile.scale
            if k_scale is not None:
                s *= lax.broadcast_in_dim(k_scale, s.shape, (1,))
            position = mosaic_gpu.by_column(position_buffer[...])
            seen = (position >= 0) & (position <= q_position)
            if tile.window is not None:
                seen &= position > q_position - tile.window
            seen = lax.broadcast_in_dim(jnp.where(seen, 1.0, 0.0), s.shape, (1,)) > 0.0
            s = jnp.where(seen, s, MASKED)

            m, l, u = carry
            top = jnp.maximum(m, jnp.max(s, axis=1))
            p = jnp.where(seen, jnp.exp(s - lax.broadcast_in_dim(top, s.shape, (0,))), 0.0)
            decay = jnp.exp(m - top)
            l = l * decay + jnp.sum(p, axis=1)
            if v_scale is not None:
                p *= lax.broadcast_in_dim(v_scale, s.shape, (1,))
            weights[...] = p.astype(tile.dtype)
            plgpu.commit_smem()
            u = u * lax.broadcast_in_dim(decay, u.shape, (0,)) + mosaic_gpu.dot(weights, v, tile.head_dim)
            return top, l, u

        for i in range(tile.stages - 1):
            pl.when(i < blocks)(functools.partial(fetch, jnp.int32(i)))
        return lax.fori_loop(0, blocks, body, carry)

    def staged(source: Any) -> Any:
        return plgpu.SMEM((tile.stages, BLOCK, *source.shape[1:]), source.dtype)

    staged_vectors = vectors((tile.stages, BLOCK, tile.head_dim))
    return pl.run_scoped(
        loop,
        [staged(source) for source in sources] if low else [staged_vectors, staged_vectors, staged(sources[-1])],
        plgpu.Barrier(num_arrivals=len(sources), num_barriers=tile.stages),
        vectors((mosaic_gpu.ROWS, BLOCK)),
        [vectors((BLOCK, tile.head_dim))] * 2 if low else [],
    )


def _unpack(codes: Any, vectors: Any, width: int) -> None:
    """INT4 codes, two in a byte, as whole numbers: the low ones left, the high ones right."""
    wide = mosaic_gpu.accumulator(codes[...]).astype(jnp.int32)
    for half, shift in enumerate((28, 24)):
        code = lax.shift_right_arithmetic(lax.shift_left(wide, shift), 28)
        vectors[:, pl.ds(half * width, width)] = code.astype(jnp.float32).astype(vectors.dtype)
