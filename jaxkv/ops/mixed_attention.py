"""Attention over a mixed-precision KV cache: the public op and the choice of its implementation."""

from collections.abc import Callable
from typing import Final, Literal, overload

from jaxtyping import Array, Float, Int

from jaxkv.ops.layer_kv import LayerKV
from jaxkv.ops.mixed_attention_xla import mixed_attention_xla

_IMPLEMENTATIONS: Final[dict[str, Callable[..., tuple[Array, Array]]]] = {"xla": mixed_attention_xla}


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
      implementation: "xla", or None to choose. A named implementation that cannot run raises.
      return_lse: also return the log-sum-exp of each query's scores, float32's finite minimum where nothing is visible.

    Returns:
      The output in q's dtype, zeros for a query that sees nothing; with `return_lse`, a pair.
    """
    name = implementation or "xla"
    if name not in _IMPLEMENTATIONS:
        raise ValueError(
            f"mixed_attention has no implementation '{name}' here; choose one of {sorted(_IMPLEMENTATIONS)} or None"
        )
    if q.shape[2] % layer.recent.k.shape[1]:
        raise ValueError(f"{q.shape[2]} query heads are not a multiple of {layer.recent.k.shape[1]} KV heads")
    out, lse = _IMPLEMENTATIONS[name](q, layer, q_position, new_kv, scale, window, sink_logits)
    return (out, lse) if return_lse else out
