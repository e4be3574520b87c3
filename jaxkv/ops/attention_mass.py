"""The attention that each slot of a cache receives: the public op and its XLA implementation."""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.ops.blocks import at_once, dense_scores, fold, low_scores, visible
from jaxkv.ops.implementation import run
from jaxkv.ops.layer_kv import DensePart, LayerKV, LowPart
from jaxkv.ops.partials import group_queries, probabilities
from jaxkv.pallas.attention_mass import attention_mass_triton
from jaxkv.pallas.triton import obstacle


def attention_mass(
    q: Float[Array, "B T H D"],
    q_position: Int[Array, "B T"],
    lse: Float[Array, "B T H"],
    layer: LayerKV,
    *,
    scale: float,
    window: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "B K S"]:
    """Attention probabilities of every slot, summed over the T queries and the query heads of each KV head.

    The accumulated score of attention-scored eviction (H2O, Zhang et al. 2023, section 4; SnapKV's window votes before
    pooling). Slots are numbered over the concatenation [high | low | recent], S = S_high + S_low + W; the arrays are
    head-major as the cache is.

    Args:
      q: queries, rotated. H is a multiple of K; query head h reads KV head h // (H / K).
      q_position: absolute positions of the queries, -1 for padding, which attends to nothing.
      lse: log-sum-exp of each query's scores, as `mixed_attention` returns it: over all that the query saw, attention
        sinks and tokens that are no longer in `layer` included. A query that saw nothing (float32's finite minimum)
        has no mass.
      layer: the cache.
      scale, window: of the attention; keys at q_position - window and before are invisible.
      implementation: "xla", "triton" (NVIDIA and AMD GPUs), "triton_interpret" (the kernel's numbers on any device), or
        None: the kernel on a GPU, else XLA. A named implementation that cannot run raises `KernelError`.

    Returns:
      float32, 0 for empty slots.
    """
    layer.check_heads(q.shape[2])
    options = {"scale": scale, "window": window}
    return run(
        "attention_mass",
        implementation,
        functools.partial(_attention_mass_xla, **options),
        functools.partial(attention_mass_triton, **options),
        obstacle(q.shape[-1], q.dtype, layer.recent.k.dtype),
        q,
        q_position,
        lse,
        layer,
    )


def _attention_mass_xla(
    q: Float[Array, "B T H D"],
    q_position: Int[Array, "B T"],
    lse: Float[Array, "B T H"],
    layer: LayerKV,
    *,
    scale: float,
    window: int | None,
) -> Float[Array, "B K S"]:
    heads = layer.recent.k.shape[1]
    group = q.shape[2] // heads
    grouped = group_queries(q.astype(jnp.float32) * scale, heads)
    grouped_lse = group_queries(lse[..., None], heads)[..., 0]

    def mass(block: DensePart | LowPart) -> Float[Array, "B K S"]:
        scores = low_scores(grouped, block) if isinstance(block, LowPart) else dense_scores(grouped, block.k)
        seen = visible(block.position, q_position, group, window)
        return probabilities(scores, grouped_lse[:, :, None], seen).sum(axis=3)

    def add(total: Array, block: DensePart | LowPart, start: Array) -> Array:
        # A sum, because the last block repeats slots, unseen.
        there = lax.dynamic_slice_in_dim(total, start, block.position.shape[1], axis=2)
        return lax.dynamic_update_slice_in_dim(total, there + mass(block), start, axis=2)

    masses = []
    for part in (layer.high, layer.low, layer.recent):
        slots = part.position.shape[1]
        if not slots:
            continue
        if isinstance(part, DensePart) and at_once(part, grouped):
            masses.append(mass(part))
        else:
            masses.append(fold(part, grouped, add, jnp.zeros((q.shape[0], heads, slots))))
    return jnp.concatenate(masses, axis=2)
