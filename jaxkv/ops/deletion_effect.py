"""What a page of slots contributes to attention outputs, and how they change without it: CommitKV's deletion effect."""

import functools
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.ops import blocks
from jaxkv.ops.implementation import run
from jaxkv.ops.layer_kv import LayerKV, LowPart
from jaxkv.ops.partials import group_queries, probabilities
from jaxkv.ops.quantize import dequantize
from jaxkv.pallas.deletion_effect import deletion_effect_triton
from jaxkv.pallas.triton import obstacle

SMALLEST_REMAINDER: Final = 2.0**-10
"""Least attention mass that is taken to remain outside a deleted set: less is below bfloat16's rounding of outputs."""


def deletion_effect(
    q: Float[Array, "B T H D"],
    q_position: Int[Array, "B T"],
    lse: Float[Array, "B T H"],
    layer: LayerKV,
    page_slots: Int[Array, "B P G"],
    *,
    scale: float,
    window: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B P H T"], Float[Array, "B P H T D"]]:
    """Attention mass and weighted value of each page's slots, for every query (the sums of CommitKV Eq. 6).

    With a_i = exp(scale q.k_i - lse) the attention probability of slot i, s = sum of a_i and u = sum of a_i v_i over
    the page's slots. So those of a joint deletion (Eq. 11) are the sums over its pages, without a second pass;
    `output_change` turns them into the change of the output.

    Args:
      q: queries, rotated. H is a multiple of K; query head h reads KV head h // (H / K).
      q_position: absolute positions of the queries, -1 for padding, which attends to nothing.
      lse: log-sum-exp of each query's scores over all that it saw, as `mixed_attention` returns it. A query that saw
        nothing (float32's finite minimum) has zeros.
      layer: the cache.
      page_slots: the distinct slots of each page, numbered over the concatenation [high | low | recent]; -1 for none.
        Empty slots, and keys that the query does not see, contribute nothing.
      scale, window: of the attention; keys at q_position - window and before are invisible.
      implementation: "xla", "triton" (NVIDIA and AMD GPUs), "triton_interpret" (the kernel's numbers on any device), or
        None: the kernel on a GPU, else XLA. A named implementation that cannot run raises `KernelError`.

    Returns:
      s and u, float32.
    """
    layer.check_heads(q.shape[2])
    options = {"scale": scale, "window": window}
    return run(
        "deletion_effect",
        implementation,
        functools.partial(_deletion_effect_xla, **options),
        functools.partial(deletion_effect_triton, **options),
        obstacle(q.shape[-1], q.dtype, layer.recent.k.dtype),
        q,
        q_position,
        lse,
        layer,
        page_slots,
    )


def output_change(
    out: Float[Array, "B T H D"], s: Float[Array, "B P H T"], u: Float[Array, "B P H T D"]
) -> Float[Array, "B P H T D"]:
    """How the output changes when a set of slots is deleted: o - o\\E = (u - s o) / (1 - s) (CommitKV Eq. 6).

    s is clamped to 1 - SMALLEST_REMAINDER: where a set holds all mass, so that u = o, the change is o itself, as if
    nothing were left to attend to; it reads as large, and is never NaN.

    Args:
      out: the attention outputs of the queries; in float32, a change is as exact as s and u are.
      s, u: of `deletion_effect`, summed over the pages that are deleted together.
    """
    o = out.astype(jnp.float32).swapaxes(1, 2)[:, None]
    s = jnp.minimum(s, 1 - SMALLEST_REMAINDER)[..., None]
    return (u - s * o) / (1 - s)


def _deletion_effect_xla(
    q: Float[Array, "B T H D"],
    q_position: Int[Array, "B T"],
    lse: Float[Array, "B T H"],
    layer: LayerKV,
    page_slots: Int[Array, "B P G"],
    *,
    scale: float,
    window: int | None,
) -> tuple[Float[Array, "B P H T"], Float[Array, "B P H T D"]]:
    b, t, h, d = q.shape
    heads, (_, pages, size) = layer.recent.k.shape[1], page_slots.shape
    grouped = group_queries(q.astype(jnp.float32) * scale, heads)
    grouped_lse = group_queries(lse[..., None], heads)[..., 0]

    def effect(slots: Int[Array, "B p G"]) -> tuple[Float[Array, "B p H T"], Float[Array, "B p H T D"]]:
        k, v, position = _gather(layer, slots.reshape(b, -1), d)
        scores = blocks.dense_scores(grouped, k)
        seen = blocks.visible(position, q_position, h // heads, window)
        a = probabilities(scores, grouped_lse[:, :, None], seen)
        a = a.reshape(b, heads, -1, size, a.shape[-1])
        v = v.reshape(b, heads, -1, size, d)
        u = jnp.einsum("bkpgm,bkpgd->bpkmd", a, v, precision=lax.Precision.HIGHEST)
        return a.sum(axis=3).swapaxes(1, 2).reshape(b, -1, h, t), u.reshape(b, -1, h, t, d)

    page_bytes = 4 * b * heads * size * (2 * d + grouped.shape[2])
    steps = -(-pages // max(1, blocks.BLOCK_BYTES // page_bytes))
    if steps == 1:
        return effect(page_slots)
    each = -(-pages // steps)
    padded = jnp.pad(page_slots, ((0, 0), (0, steps * each - pages), (0, 0)), constant_values=-1)
    found = lax.map(effect, padded.reshape(b, steps, each, size).swapaxes(0, 1))
    s, u = (x.swapaxes(0, 1).reshape(b, steps * each, *x.shape[3:])[:, :pages] for x in found)
    return s, u


def _gather(
    layer: LayerKV, slots: Int[Array, "B N"], head_dim: int
) -> tuple[Float[Array, "B K N D"], Float[Array, "B K N D"], Int[Array, "B N"]]:
    """Keys and values in float32, and positions, of numbered slots; position -1 for a number that is no slot."""
    shape = (*layer.recent.k.shape[:2], slots.shape[1], head_dim)
    k, v, position = jnp.zeros(shape), jnp.zeros(shape), jnp.full(slots.shape, -1)
    first = 0
    for part in (layer.high, layer.low, layer.recent):
        count = part.position.shape[1]
        if not count:
            continue
        local = slots - first
        held = (local >= 0) & (local < count)
        tile = jax.tree.map(functools.partial(_take, slots=jnp.clip(local, 0, count - 1)), part)
        if isinstance(tile, LowPart):
            tile_k = dequantize(tile.k_codes, tile.k_scale, head_dim)
            tile_v = dequantize(tile.v_codes, tile.v_scale, head_dim)
        else:
            tile_k, tile_v = tile.k.astype(jnp.float32), tile.v.astype(jnp.float32)
        here = held[:, None, :, None]
        k, v = jnp.where(here, tile_k, k), jnp.where(here, tile_v, v)
        position = jnp.where(held, tile.position, position)
        first += count
    return k, v, position


def _take(x: Array, slots: Int[Array, "B N"]) -> Array:
    """Slots of an array of a partition: of its positions [B, S], or of what is head-major [B, K, S, ...]."""
    if x.ndim == 2:
        return jnp.take_along_axis(x, slots, axis=1)
    return jax.vmap(lambda row, index: row[:, index])(x, slots)
