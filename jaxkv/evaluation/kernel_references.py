"""What kernels are checked against: plain attention over the dequantised cache in float32, nothing blocked."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.ops.layer_kv import LayerKV
from jaxkv.ops.partials import MASKED
from jaxkv.ops.quantize import dequantize


def dequantized(layer: LayerKV, head_dim: int) -> tuple[Float[Array, "B K S D"], Float[Array, "B K S D"], Array]:
    """Keys, values and positions [B, S] of all slots, high then low then recent, in float32."""
    low = layer.low
    k = [layer.high.k, dequantize(low.k_codes, low.k_scale, head_dim), layer.recent.k]
    v = [layer.high.v, dequantize(low.v_codes, low.v_scale, head_dim), layer.recent.v]
    position = [layer.high.position, low.position, layer.recent.position]
    return (
        jnp.concatenate([x.astype(jnp.float32) for x in k], axis=2),
        jnp.concatenate([x.astype(jnp.float32) for x in v], axis=2),
        jnp.concatenate(position, axis=1),
    )


def plain_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    k_position: Int[Array, "B S"],
    q_position: Int[Array, "B T"],
    sink_logits: Float[Array, "H"] | None = None,
    *,
    scale: float,
    window: int | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Output and log-sum-exp of one plain softmax in float32; zeros and MASKED for a query that sees nothing."""
    group = q.shape[2] // k.shape[1]
    k, v = (jnp.repeat(x.astype(jnp.float32), group, axis=1) for x in (k, v))
    highest = lax.Precision.HIGHEST
    scores = jnp.einsum("bthd,bhsd->bths", q.astype(jnp.float32), k, precision=highest) * scale
    keys, queries = k_position[:, None, :], q_position[:, :, None]
    seen = (keys >= 0) & (keys <= queries)
    if window is not None:
        seen &= keys > queries - window
    seen = jnp.broadcast_to(seen[:, :, None], scores.shape)
    if sink_logits is not None:
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink_logits[:, None], (*scores.shape[:3], 1))], axis=3)
        v = jnp.concatenate([v, jnp.zeros_like(v[:, :, :1])], axis=2)
        seen = jnp.concatenate([seen, jnp.ones_like(seen[..., :1])], axis=3)
    scores = jnp.where(seen, scores, -jnp.inf)
    some = seen.any(axis=3)
    top = jnp.where(some, scores.max(axis=3), 0.0)
    weights = jnp.exp(scores - top[..., None])
    total = weights.sum(axis=3)
    out = jnp.einsum("bths,bhsd->bthd", weights, v, precision=highest) / jnp.where(some, total, 1.0)[..., None]
    return out, jnp.where(some, top + jnp.log(jnp.where(some, total, 1.0)), MASKED)


def plain_probabilities(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B K S D"],
    k_position: Int[Array, "B S"],
    q_position: Int[Array, "B T"],
    lse: Float[Array, "B T H"],
    *,
    scale: float,
    window: int | None = None,
) -> Float[Array, "B T H S"]:
    """Attention probabilities of every pair, given the log-sum-exps; 0 where a query does not see a key."""
    k = jnp.repeat(k.astype(jnp.float32), q.shape[2] // k.shape[1], axis=1)
    scores = jnp.einsum("bthd,bhsd->bths", q.astype(jnp.float32), k, precision=lax.Precision.HIGHEST) * scale
    keys, queries = k_position[:, None, :], q_position[:, :, None]
    seen = (keys >= 0) & (keys <= queries)
    if window is not None:
        seen &= keys > queries - window
    known = (lse > MASKED)[..., None]
    return jnp.where(seen[:, :, None] & known, jnp.exp(scores - jnp.where(known, lse[..., None], 0.0)), 0.0)


def relative_error(found: Any, wanted: Any) -> float:
    """The largest relative norm of the error over the outputs of a call; infinite where a number is not finite.

    Log-sum-exps of nothing (MASKED) have to agree exactly and do not count towards the norm.
    """
    worst = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        nothing = y == MASKED
        if x.shape != y.shape or not np.isfinite(x).all() or not ((x == MASKED) == nothing).all():
            return float("inf")
        x, y = x[~nothing], y[~nothing]
        norm = np.linalg.norm(y)
        worst = max(worst, float(np.linalg.norm(x - y) / norm) if norm else float(np.abs(x).max(initial=0.0)))
    return worst
