"""Symmetric INT4 rows with FP16 scales (PASK Appendix B.5).

Each key or value vector of one token and one KV head has its own scale, `max|x| / 7` rounded to FP16 and at least
FP16's smallest positive value; codes are `x / scale` rounded to nearest (ties to even) with the *stored* scale and
clipped to [-7, 7]. A zero vector has zero codes and unit scale. How codes share bytes is in `ops.int4`.
"""

from typing import Final

import jax.numpy as jnp
from jaxtyping import Array, Float, Float16, UInt8

from jaxkv.ops.int4 import pack, unpack

SMALLEST_SCALE: Final = 2.0**-24


def quantize(x: Float[Array, "*n D"]) -> tuple[UInt8[Array, "*n P"], Float16[Array, "*n"]]:
    """Vectors to packed INT4 codes and FP16 scales.

    A vector whose scale exceeds FP16's range gets an infinite scale, and dequantising it gives NaN: `state.transfer`,
    which writes into states, turns it into a fault of its row.
    """
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1)
    scale = jnp.where(largest > 0, jnp.maximum(largest / 7.0, SMALLEST_SCALE), 1.0).astype(jnp.float16)
    codes = jnp.clip(jnp.round(x / scale.astype(jnp.float32)[..., None]), -7, 7).astype(jnp.int8)
    return pack(codes), scale


def dequantize(packed: UInt8[Array, "*n P"], scale: Float16[Array, "*n"], head_dim: int) -> Float[Array, "*n D"]:
    """Packed codes and scales to float32 vectors. For tests and references: ops dequantise block by block."""
    codes = jnp.concatenate(unpack(packed), axis=-1)[..., :head_dim]
    return codes.astype(jnp.float32) * scale.astype(jnp.float32)[..., None]
