"""A partition read block by block in XLA, so that no more than BLOCK_BYTES of it are float32 at a time."""

from collections.abc import Callable
from typing import Final, TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.ops.int4 import packed_width, unpack
from jaxkv.ops.layer_kv import DensePart, LowPart

BLOCK_BYTES: Final = 8 << 20
Carry = TypeVar("Carry")
PartT = TypeVar("PartT", bound=DensePart | LowPart)


def visible(
    position: Int[Array, "B S"], q_position: Int[Array, "B T"], group: int, window: int | None
) -> Bool[Array, "B 1 S #M"]:
    """Which slots each query sees: occupied, at most its own position, and within `window` of it. M = (G, T)."""
    keys, queries = position[:, :, None], q_position[:, None, :]
    seen = (keys >= 0) & (keys <= queries)
    if window is not None:
        seen &= keys > queries - window
    return jnp.tile(seen, (1, 1, group if q_position.shape[1] > 1 else 1))[:, None]


def dense_scores(grouped: Float[Array, "B K M D"], k: Float[Array, "B K S D"]) -> Float[Array, "B K S M"]:
    """Products of queries, scaled before, and keys; keys first, which XLA's CPU backend computes faster."""
    return jnp.einsum("bksd,bkmd->bksm", k.astype(jnp.float32), grouped, precision=lax.Precision.HIGHEST)


def low_scores(grouped: Float[Array, "B K M D"], part: LowPart) -> Float[Array, "B K S M"]:
    """The same of INT4 keys: their codes' products, scaled."""
    width = packed_width(grouped.shape[-1])
    halves = unpack(part.k_codes)
    queries = (grouped[..., :width], grouped[..., width:])
    scores = sum(
        dense_scores(query, half[..., : query.shape[-1]].astype(jnp.float32))
        for query, half in zip(queries, halves, strict=True)
    )
    return scores * part.k_scale.astype(jnp.float32)[..., None]


def block_slots(grouped: Float[Array, "B K M D"]) -> int:
    """Slots whose scores and keys take BLOCK_BYTES in float32: what stays in a CPU's cache."""
    b, heads, queries, d = grouped.shape
    return max(64, BLOCK_BYTES // (4 * b * heads * (queries + d)))


def at_once(part: DensePart, grouped: Float[Array, "B K M D"]) -> bool:
    """Whether a partition is better read whole: in float32 its keys need no copy, and only the scores take memory."""
    b, heads, queries, _ = grouped.shape
    slots = part.position.shape[1]
    if part.k.dtype == jnp.float32 and 4 * b * heads * queries * slots <= 8 * BLOCK_BYTES:
        return True
    return slots <= block_slots(grouped)


def fold(
    part: PartT,
    grouped: Float[Array, "B K M D"],
    step: Callable[[Carry, PartT, Int[Array, ""]], Carry],
    carry: Carry,
) -> Carry:
    """`step` over the blocks of a partition, each with the slot at which it starts.

    The last block starts early enough to be whole; what it repeats is unseen (position -1).
    """
    slots = part.position.shape[1]
    # Never a single block: XLA would drop the loop and dequantise every layer's block at once, up front.
    size = min(block_slots(grouped), -(-slots // 2))
    fields = {name: getattr(part, name) for name in part.__dataclass_fields__}

    def body(i: Array, carry: Carry) -> Carry:
        start = jnp.minimum(i * size, slots - size)
        whole = fields
        if "bfloat16" in {str(x.dtype) for x in fields.values()}:
            # XLA's CPU backend slices bfloat16 in float32. Without a barrier it would convert the whole partition
            # before the loop, once for all blocks.
            whole, start = lax.optimization_barrier((fields, start))
        block = {
            name: lax.dynamic_slice_in_dim(x, start, size, axis=1 if name == "position" else 2)
            for name, x in whole.items()
        }
        fresh = start + jnp.arange(size) >= i * size
        block["position"] = jnp.where(fresh, block["position"], -1)
        return step(carry, type(part)(**block), start)

    return lax.fori_loop(0, -(-slots // size), body, carry)
