"""The pieces that every implementation of attention over partitions shares: grouped queries and softmax partials."""

import functools
from collections.abc import Sequence
from typing import Final, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

MASKED: Final = float(jnp.finfo(jnp.float32).min)
_TINY: Final = float(jnp.finfo(jnp.float32).tiny)


class Partial(NamedTuple):
    """A share of a softmax (PASK Eq. 15): score maximum, exponential sum, unnormalised value.

    M = (G, T) are the queries of one KV head, G = H / K. A query that sees nothing has MASKED, 0, 0.
    """

    m: Float[Array, "*N M"]
    l: Float[Array, "*N M"]
    u: Float[Array, "*N M D"]


def group_queries(q: Float[Array, "B T H D"], kv_heads: int) -> Float[Array, "B K M D"]:
    """Queries by the KV head that they read; M = (G, T)."""
    b, t, h, d = q.shape
    grouped = q.reshape(b, t, kv_heads, h // kv_heads, d).transpose(0, 2, 3, 1, 4)
    return grouped.reshape(b, kv_heads, h // kv_heads * t, d)


def ungroup(x: Float[Array, "B K M *D"], tokens: int) -> Float[Array, "B T H *D"]:
    """The inverse of `group_queries`, of values [B, K, M, D] or statistics [B, K, M]."""
    b, kv_heads, m, *d = x.shape
    order = (0, 3, 1, 2, 4)[: 4 + len(d)]
    return x.reshape(b, kv_heads, m // tokens, tokens, *d).transpose(order).reshape(b, tokens, -1, *d)


def probabilities(scores: Float[Array, "*N"], lse: Float[Array, "*#N"], seen: Bool[Array, "*#N"]) -> Float[Array, "*N"]:
    """Attention probabilities whose normalisation is known, exp(score - lse); 0 where unseen.

    A query whose lse is MASKED saw nothing.
    """
    return jnp.exp(jnp.where(seen & (lse > MASKED), scores - lse, MASKED))


def merge(partials: Sequence[Partial]) -> Partial:
    """One normalisation over disjoint partials (PASK Eq. 15); empty ones contribute nothing.

    The sums are written out. As a reduction over a stack, XLA's CPU backend (jax 0.10.2) fuses them with the output
    projection that reads them, and that fusion computes all rows but the first wrongly.
    """
    m = functools.reduce(jnp.maximum, [partial.m for partial in partials])
    weights = [jnp.exp(partial.m - m) for partial in partials]
    pairs = list(zip(weights, partials, strict=True))
    total = functools.reduce(jnp.add, [weight * partial.l for weight, partial in pairs])
    value = functools.reduce(jnp.add, [weight[..., None] * partial.u for weight, partial in pairs])
    return Partial(m, total, value)


def normalize(
    partial: Partial, sink_logits: Float[Array, "H"] | None, tokens: int
) -> tuple[Float[Array, "B K M D"], Float[Array, "B K M"]]:
    """Output and log-sum-exp; sink logits take part in the normalisation and have no value.

    Queries that see nothing get zeros and MASKED.
    """
    m, l, u = partial
    if sink_logits is not None:
        heads = m.shape[1]
        sink = jnp.repeat(sink_logits.astype(jnp.float32).reshape(heads, -1), tokens, axis=1)[None]
        top = jnp.maximum(m, sink)
        l, u, m = l * jnp.exp(m - top) + jnp.exp(sink - top), u * jnp.exp(m - top)[..., None], top
    safe = jnp.maximum(l, _TINY)
    return u / safe[..., None], jnp.where(l > 0, m + jnp.log(safe), MASKED)
