"""Attention over a mixed-precision KV cache: the public op and the choice of its implementation."""

import functools
from typing import Any, Literal, overload

from jaxtyping import Array, Float, Int

from jaxkv.ops.implementation import run
from jaxkv.ops.layer_kv import LayerKV
from jaxkv.ops.mixed_attention_xla import mixed_attention_xla
from jaxkv.pallas.mixed_attention import mixed_attention_triton
from jaxkv.pallas.triton import obstacle


@overload
def mixed_attention(
    q: Array,
    layer: LayerKV,
    q_position: Array,
    *,
    new_kv: tuple[Array, Array] | None = None,
    scale: float,
    window: int | None = None,
    sink_logits: Array | None = None,
    implementation: str | None = None,
    return_lse: Literal[False] = False,
) -> Array: ...
@overload
def mixed_attention(
    q: Array,
    layer: LayerKV,
    q_position: Array,
    *,
    new_kv: tuple[Array, Array] | None = None,
    scale: float,
    window: int | None = None,
    sink_logits: Array | None = None,
    implementation: str | None = None,
    return_lse: Literal[True],
) -> tuple[Array, Array]: ...
def mixed_attention(
    q: Float[Array, "B T H D"],
    layer: LayerKV,
    q_position: Int[Array, "B T"],
    *,
    new_kv: tuple[Float[Array, "B T K D"], Float[Array, "B T K D"]] | None = None,
    scale: float,
    window: int | None = None,
    sink_logits: Float[Array, "H"] | None = None,
    implementation: str | None = None,
    return_lse: bool = False,
) -> Float[Array, "B T H D"] | tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Attend from T new tokens to the compressed cache and, causally, to each other (PASK B.5, Eq. 15).

    T = 1 decodes; T > 1 reads an observation over a compressed cache. A key is visible when its position is at most
    the query's. All partitions share one softmax; scores, statistics and accumulation are float32.

    Args:
      q: queries, rotated. H is a multiple of K; query head h reads KV head h // (H / K).
      layer: the cache.
      q_position: absolute positions of the new tokens, -1 for padding (zeros as a query, unseen as a key).
      new_kv: keys and values of the new tokens, if `layer` does not hold them yet.
      scale: multiplies the scores, usually D ** -0.5.
      window: sliding-window attention; keys at q_position - window and before are invisible.
      sink_logits: one extra logit per head that takes part in the normalisation and has no value.
      implementation: "xla", "triton" (NVIDIA and AMD GPUs), "triton_interpret" (the kernel's numbers on any device), or
        None: the kernel on a GPU, else XLA. "mosaic_gpu" (Hopper, T = 1, not timed yet) and "mosaic_gpu_interpret" have
        to be named. A named implementation that cannot run raises `KernelError`.
      return_lse: also return the log-sum-exp of each query's scores, float32's finite minimum where nothing is visible.

    Returns:
      The output in q's dtype, zeros for a query that sees nothing; with `return_lse`, a pair.
    """
    layer.check_heads(q.shape[2])
    options = {"scale": scale, "window": window}
    out, lse = run(
        "mixed_attention",
        implementation,
        functools.partial(mixed_attention_xla, **options),
        functools.partial(mixed_attention_triton, **options),
        obstacle(q.shape[-1], q.dtype, layer.recent.k.dtype),
        q,
        layer,
        q_position,
        new_kv,
        sink_logits,
        mosaic_gpu=functools.partial(_mosaic_gpu, **options),
    )
    return (out, lse) if return_lse else out


def _mosaic_gpu(*operands: Any, **options: Any) -> tuple[Array, Array]:
    # Mosaic GPU takes most of a second to import, and only those who name it need it.
    from jaxkv.pallas.mixed_attention_mosaic import mixed_attention_mosaic_gpu

    return mixed_attention_mosaic_gpu(*operands, **options)
