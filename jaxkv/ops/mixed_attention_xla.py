"""`mixed_attention` in plain XLA: what is small in one softmax, the rest block by block.

Parts whose float32 intermediates are small share one concatenated softmax. A larger one, and INT4 always, is
read in a loop whose carry is the online-softmax triple (max, sum, unnormalised value): one block is converted to
float32 at a time.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.ops.blocks import PartT, at_once, dense_scores, fold, low_scores, visible
from jaxkv.ops.int4 import unpack
from jaxkv.ops.layer_kv import LayerKV, LowPart
from jaxkv.ops.partials import MASKED, Partial, group_queries, merge, normalize, ungroup


class Block(NamedTuple):
    """Some slots of a partition: their masked scores, and how to weigh their values."""

    scores: Float[Array, "B K S M"]
    visible: Bool[Array, "B 1 S #M"]
    weigh: Callable[[Float[Array, "B K S M"]], Float[Array, "B K M D"]]


def mixed_attention_xla(
    q: Float[Array, "B T H D"],
    layer: LayerKV,
    q_position: Int[Array, "B T"],
    new_kv: tuple[Float[Array, "B T K D"], Float[Array, "B T K D"]] | None,
    sink_logits: Float[Array, "H"] | None,
    *,
    scale: float,
    window: int | None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """See `mixed_attention`; returns the output and lse."""
    _, t, h, d = q.shape
    heads = layer.recent.k.shape[1]
    group = h // heads
    # One axis M = (G, T) of queries for each KV head: with two, XLA's CPU backend transposes the keys in memory. Scores
    # are [S, M], keys first, which it computes faster than [M, S].
    grouped = group_queries(q.astype(jnp.float32) * scale, heads)

    def dense(k: Float[Array, "B K S D"], v: Float[Array, "B K S D"], position: Int[Array, "B S"]) -> Block:
        seen = visible(position, q_position, group, window)
        scores = dense_scores(grouped, k)
        return Block(
            jnp.where(seen, scores, MASKED),
            seen,
            lambda p: jnp.einsum("bksm,bksd->bkmd", p, v.astype(jnp.float32), precision=lax.Precision.HIGHEST),
        )

    def low(part: LowPart) -> Block:
        seen = visible(part.position, q_position, group, window)
        scores = jnp.where(seen, low_scores(grouped, part), MASKED)
        return Block(scores, seen, lambda p: _low_values(p, part, d))

    joined = [dense(layer.recent.k, layer.recent.v, layer.recent.position)]
    if new_kv is not None:
        # The causal mask among the new tokens is the position rule: a later token's position exceeds the query's.
        joined.append(dense(new_kv[0].swapaxes(1, 2), new_kv[1].swapaxes(1, 2), q_position))
    partials = []
    if layer.high.position.shape[1]:
        if at_once(layer.high, grouped):
            joined.append(dense(layer.high.k, layer.high.v, layer.high.position))
        else:
            partials.append(_online(layer.high, grouped, lambda x: dense(x.k, x.v, x.position)))
    if layer.low.position.shape[1]:
        partials.append(_online(layer.low, grouped, low))
    partials.append(_softmax(joined))

    out, lse = normalize(merge(partials), sink_logits, t)
    return ungroup(out, t).astype(q.dtype), ungroup(lse, t)


def _low_values(p: Float[Array, "B K S M"], part: LowPart, head_dim: int) -> Float[Array, "B K M D"]:
    # Turned before it is scaled, so that the transposition is not folded into the product: XLA's CPU backend has a fast
    # kernel for [M, S] times [S, P] only.
    weights = p.swapaxes(2, 3) * part.v_scale.astype(jnp.float32)[:, :, None]
    halves = [
        jnp.einsum("bkms,bksd->bkmd", weights, half.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        for half in unpack(part.v_codes)
    ]
    return jnp.concatenate(halves, axis=-1)[..., :head_dim]


def _softmax(blocks: list[Block]) -> Partial:
    """The partial of several blocks under one maximum."""
    scores = jnp.concatenate([b.scores for b in blocks], axis=2)
    visible = jnp.concatenate([b.visible for b in blocks], axis=2)
    m = scores.max(axis=2)
    p = jnp.where(visible, jnp.exp(scores - m[:, :, None]), 0.0)
    u, start = 0.0, 0
    for block in blocks:
        stop = start + block.scores.shape[2]
        u = u + block.weigh(p[:, :, start:stop])
        start = stop
    return Partial(m, p.sum(axis=2), jnp.asarray(u))


def _online(part: PartT, grouped: Float[Array, "B K M D"], read: Callable[[PartT], Block]) -> Partial:
    """The partial of a partition, block by block."""
    empty = Partial(jnp.full(grouped.shape[:3], MASKED), jnp.zeros(grouped.shape[:3]), jnp.zeros(grouped.shape))
    return fold(part, grouped, lambda carry, block, _: merge([carry, _softmax([read(block)])]), empty)
