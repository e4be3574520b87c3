"""Random caches, and attention over them written again in float64: what the tests of the attention ops share."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.ops.layer_kv import DensePart, LayerKV, LowPart
from jaxkv.ops.partials import MASKED
from jaxkv.ops.quantize import dequantize, quantize

# One compilation instead of one for each of their operations.
quantize = jax.jit(quantize)
dequantize = jax.jit(dequantize, static_argnums=2)


def make_layer(rng, rows, kv_heads, dim, high, low, ring, length, density=0.8, outlier=False):
    """Random partitions whose positions are disjoint per row, below `length`; empty slots hold garbage."""
    positions = np.stack([rng.permutation(length) for _ in range(rows)])
    cuts = np.cumsum([0, high, low, ring])
    split = [np.where(rng.random((rows, b - a)) < density, positions[:, a:b], -1) for a, b in itertools.pairwise(cuts)]

    def values(slots):
        x = rng.standard_normal((rows, kv_heads, slots, dim)).astype(np.float32)
        if outlier:
            x[..., 0] *= 100
        return jnp.asarray(x)

    def dense(slots, position):
        return DensePart(values(slots), values(slots), jnp.asarray(position, jnp.int32))

    k_codes, k_scale = quantize(values(low))
    v_codes, v_scale = quantize(values(low))
    return LayerKV(
        high=dense(high, split[0]),
        low=LowPart(k_codes, v_codes, k_scale, v_scale, jnp.asarray(split[1], jnp.int32)),
        recent=dense(ring, split[2]),
    )


def with_dtype(layer, dtype):
    """The layer with its dense keys and values in another dtype."""
    return jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x, layer)


def numbered(layer, dim):
    """Keys and values [B, K, S, D] in float64 and positions [B, S] of all slots, in the order of their numbers."""
    low = layer.low
    k = [layer.high.k, dequantize(low.k_codes, low.k_scale, dim), layer.recent.k]
    v = [layer.high.v, dequantize(low.v_codes, low.v_scale, dim), layer.recent.v]
    position = [np.asarray(part.position) for part in (layer.high, low, layer.recent)]
    k, v = (np.concatenate([np.asarray(x, np.float64) for x in parts], 2) for parts in (k, v))
    return k, v, np.concatenate(position, 1)


class Attention:
    """Attention of every query to every numbered slot, one pair at a time.

    `a` [B, H, T, S] probabilities, `out` [B, T, H, D], `lse` [B, T, H] (MASKED where nothing is seen).
    """

    def __init__(self, q, q_position, layer, scale, window=None, sink_logits=None, deleted=None):
        q, q_position = np.asarray(q, np.float64), np.asarray(q_position)
        rows, tokens, heads, dim = q.shape
        k, v, position = numbered(layer, dim)
        group = heads // k.shape[1]
        self.a = np.zeros((rows, heads, tokens, position.shape[1]))
        self.out, self.lse = np.zeros(q.shape), np.full((rows, tokens, heads), MASKED)
        for b, h, t in np.ndindex(rows, heads, tokens):
            scores = {}
            for slot, p in enumerate(position[b]):
                gone = deleted is not None and slot in deleted[b]
                near = window is None or p > q_position[b, t] - window
                if 0 <= p <= q_position[b, t] and near and not gone:
                    scores[slot] = k[b, h // group, slot] @ q[b, t, h] * scale
            if not scores:
                continue
            sink = [] if sink_logits is None else [sink_logits[h]]
            self.lse[b, t, h] = lse = np.logaddexp.reduce([*scores.values(), *sink])
            for slot, score in scores.items():
                self.a[b, h, t, slot] = np.exp(score - lse)
            self.out[b, t, h] = self.a[b, h, t] @ v[b, h // group]


def relative_error(found, wanted):
    """Relative norm of the error; infinite where a number is not finite."""
    found = np.asarray(found, np.float64)
    assert found.shape == wanted.shape
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted) if np.isfinite(found).all() else np.inf
