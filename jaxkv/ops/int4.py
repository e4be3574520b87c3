"""Packed signed INT4: two codes a byte, dimensions d and d + P together, P = ceil(D/2) (PASK B.5).

Unpacking is two contiguous halves with no interleave, which both XLA and Triton lower to cheap shifts.
"""

from typing import Final

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int8, UInt8

SMALLEST_SCALE: Final = 2.0**-24  # FP16's smallest positive value


def packed_width(head_dim: int) -> int:
    """Bytes of one packed vector of `head_dim` codes."""
    return (head_dim + 1) // 2


def pack(codes: Int8[Array, "*n D"]) -> UInt8[Array, "*n P"]:
    """Signed codes in [-7, 7] to bytes; dimension d in the low nibble, d + P in the high one.

    An odd D gets one zero.
    """
    width = packed_width(codes.shape[-1])
    if codes.shape[-1] % 2:
        codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, 1)])
    nibbles = codes.astype(jnp.uint8) & 0xF
    return nibbles[..., :width] | (nibbles[..., width:] << 4)


def unpack(packed: UInt8[Array, "*n P"]) -> tuple[Int8[Array, "*n P"], Int8[Array, "*n P"]]:
    """Bytes to the two halves of signed codes: dimensions [0, P) and [P, 2P)."""
    signed = lax.bitcast_convert_type(packed, jnp.int8)
    low = lax.shift_right_arithmetic(lax.shift_left(signed, jnp.int8(4)), jnp.int8(4))
    high = lax.shift_right_arithmetic(signed, jnp.int8(4))
    return low, high
