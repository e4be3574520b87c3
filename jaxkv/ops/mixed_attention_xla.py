"""`mixed_attention` in plain XLA: small partitions in one softmax, large ones block by block.

A partition of at most BLOCK slots joins one concatenated softmax. A larger one is read in a loop whose carry is the
online-softmax triple (max, sum, unnormalised value), so that no more than one block of INT4 is ever dequantised.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.ops.int4 import packed_width, unpack
from jaxkv.ops.layer_kv import LayerKV, LowPart

BLOCK: Final = 512
MASKED: Final = float(jnp.finfo(jnp.float32).min)


class Partial(NamedTuple):
    """One partition's share of a softmax (PASK Eq. 15): score maximum, exponential sum, unnormalised value."""

    m: Float[Array, "B K G T"]
    l: Float[Array, "B K G T"]
    u: Float[Array, "B K G T D"]


class Block(NamedTuple):
    """Some slots of a partition: their masked scores, and how to weigh their values."""

    scores: Float[Array, "B K G T S"]
    visible: Bool[Array, "B 1 1 T S"]
    weigh: Callable[[Float[Array, "B K G T S"]], Float[Array, "B K G T D"]]


def mixed_attention_xla(
    q: Float[Array, "B T H D"],
    layer: LayerKV,
    q_position: Int[Array, "B T"],
    new_kv: tuple[Float[Array, "B T K D"], Float[Array, "B T K D"]],
    scale: float,
    window: int | None,
    sink_logits: Float[Array, "H"] | None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """See `mixed_attention`; returns the output and lse."""
    b, t, h, d = q.shape
    heads = new_kv[0].shape[2]
    grouped = (q.astype(jnp.float32) * scale).reshape(b, t, heads, h // heads, d).transpose(0, 2, 3, 1, 4)
    new_k, new_v = (x.swapaxes(1, 2) for x in new_kv)

    def visible(position: Int[Array, "B S"]) -> Bool[Array, "B 1 1 T S"]:
        keys, queries = position[:, None, :], q_position[:, :, None]
        seen = (keys >= 0) & (keys <= queries)
        if window is not None:
            seen &= keys > queries - window
        return seen[:, None, None]

    def dense(k: Float[Array, "B K S D"], v: Float[Array, "B K S D"], position: Int[Array, "B S"]) -> Block:
        seen = visible(position)
        scores = jnp.einsum("bkgtd,bksd->bkgts", grouped, k.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        return Block(
            jnp.where(seen, scores, MASKED),
            seen,
            lambda p: jnp.einsum("bkgts,bksd->bkgtd", p, v.astype(jnp.float32), precision=lax.Precision.HIGHEST),
        )

    def low(part: LowPart) -> Block:
        seen = visible(part.position)
        scores = jnp.where(seen, _low_scores(grouped, part), MASKED)
        return Block(scores, seen, lambda p: _low_values(p, part, d))

    # The causal mask among the new tokens is the position rule: a later token's position exceeds the query's.
    joined = [dense(layer.recent.k, layer.recent.v, layer.recent.position), dense(new_k, new_v, q_position)]
    partials = []
    for part, read in ((layer.high, lambda x: dense(x.k, x.v, x.position)), (layer.low, low)):
        slots = part.position.shape[1]
        if 0 < slots <= BLOCK:
            joined.append(read(part))
        elif slots:
            partials.append(_loop(part, slots, lambda x, read=read: _softmax([read(x)]), grouped))
    partials.append(_softmax(joined))

    m, l, u = _merge(partials)
    if sink_logits is not None:
        sink = sink_logits.astype(jnp.float32).reshape(heads, h // heads)[None, :, :, None]
        top = jnp.maximum(m, sink)
        l, u, m = l * jnp.exp(m - top) + jnp.exp(sink - top), u * jnp.exp(m - top)[..., None], top
    out = u / jnp.maximum(l, jnp.finfo(jnp.float32).tiny)[..., None]
    lse = jnp.where(l > 0, m + jnp.log(jnp.maximum(l, jnp.finfo(jnp.float32).tiny)), MASKED)
    out = out.transpose(0, 3, 1, 2, 4).reshape(b, t, h, d).astype(q.dtype)
    return out, lse.transpose(0, 3, 1, 2).reshape(b, t, h)


def _low_scores(grouped: Float[Array, "B K G T D"], part: LowPart) -> Float[Array, "B K G T S"]:
    width = packed_width(grouped.shape[-1])
    halves = unpack(part.k_codes)
    queries = (grouped[..., :width], grouped[..., width:])
    scores = sum(
        jnp.einsum(
            "bkgtd,bksd->bkgts",
            query,
            half[..., : query.shape[-1]].astype(jnp.float32),
            precision=lax.Precision.HIGHEST,
        )
        for query, half in zip(queries, halves, strict=True)
    )
    return scores * part.k_scale.astype(jnp.float32)[:, :, None, None]


def _low_values(p: Float[Array, "B K G T S"], part: LowPart, head_dim: int) -> Float[Array, "B K G T D"]:
    weights = p * part.v_scale.astype(jnp.float32)[:, :, None, None]
    halves = [
        jnp.einsum("bkgts,bksd->bkgtd", weights, half.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        for half in unpack(part.v_codes)
    ]
    return jnp.concatenate(halves, axis=-1)[..., :head_dim]


def _softmax(blocks: list[Block]) -> Partial:
    """The partial of several blocks under one maximum."""
    scores = jnp.concatenate([b.scores for b in blocks], axis=-1)
    visible = jnp.concatenate([b.visible for b in blocks], axis=-1)
    m = scores.max(axis=-1)
    p = jnp.where(visible, jnp.exp(scores - m[..., None]), 0.0)
    u, start = 0.0, 0
    for block in blocks:
        stop = start + block.scores.shape[-1]
        u = u + block.weigh(p[..., start:stop])
        start = stop
    return Partial(m, p.sum(axis=-1), jnp.asarray(u))


def _merge(partials: list[Partial]) -> Partial:
    """One normalisation over disjoint partials (PASK Eq. 15); empty ones have l = 0, u = 0 and contribute nothing."""
    if len(partials) == 1:
        return partials[0]
    m = jnp.stack([p.m for p in partials]).max(axis=0)
    weights = [jnp.exp(p.m - m) for p in partials]
    l = sum(w * p.l for w, p in zip(weights, partials, strict=True))
    u = sum(w[..., None] * p.u for w, p in zip(weights, partials, strict=True))
    return Partial(m, jnp.asarray(l), jnp.asarray(u))


def _loop(part, slots: int, read: Callable, grouped: Float[Array, "B K G T D"]) -> Partial:
    """Fold `read` over blocks of a partition. The last block starts early enough to be whole; what it repeats is unseen."""
    b, k, g, t, d = grouped.shape
    empty = Partial(jnp.full((b, k, g, t), MASKED), jnp.zeros((b, k, g, t)), jnp.zeros((b, k, g, t, d)))
    fields = {name: getattr(part, name) for name in part.__dataclass_fields__}

    def body(i: Array, carry: Partial) -> Partial:
        start = jnp.minimum(i * BLOCK, slots - BLOCK)
        block = {
            name: lax.dynamic_slice_in_dim(x, start, BLOCK, axis=1 if name == "position" else 2)
            for name, x in fields.items()
        }
        fresh = start + jnp.arange(BLOCK) >= i * BLOCK
        block["position"] = jnp.where(fresh, block["position"], -1)
        return _merge([carry, read(type(part)(**block))])

    return lax.fori_loop(0, -(-slots // BLOCK), body, empty)
