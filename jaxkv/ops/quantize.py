"""Symmetric INT4 vectors with FP16 scales (PASK Appendix B.5): the public op and its XLA implementation.

Each key or value vector of one token and one KV head has its own scale, `max|x| / 7` rounded to FP16 and at least
FP16's smallest positive value; codes are `x / scale` rounded to nearest (ties to even) with the *stored* scale and
clipped to [-7, 7]. A zero vector has zero codes and unit scale. How codes share bytes is in `ops.int4`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float16, UInt8

from jaxkv.ops.implementation import run
from jaxkv.ops.int4 import SMALLEST_SCALE, pack, unpack
from jaxkv.pallas.quantize import quantize_triton
from jaxkv.pallas.triton import obstacle


def quantize(
    x: Float[Array, "*n D"], *, implementation: str | None = None
) -> tuple[UInt8[Array, "*n P"], Float16[Array, "*n"]]:
    """Vectors to packed INT4 codes, P = ceil(D/2) bytes each, and FP16 scales (PASK B.5).

    A vector whose scale exceeds FP16's range gets an infinite scale, and dequantising it gives NaN: `state.transfer`,
    which writes into states, turns it into a fault of its row.

    Args:
      x: vectors, float32, bfloat16 or float16.
      implementation: "xla", "triton" (NVIDIA and AMD GPUs), "triton_interpret" (the kernel's numbers on any device), or
        None: the kernel on a GPU, else XLA. A named implementation that cannot run raises `KernelError`.
    """
    return run("quantize", implementation, _quantize_xla, quantize_triton, obstacle(x.shape[-1], x.dtype, least=1), x)


def dequantize(packed: UInt8[Array, "*n P"], scale: Float16[Array, "*n"], head_dim: int) -> Float[Array, "*n D"]:
    """Packed codes and scales to float32 vectors. For tests and references: ops dequantise block by block."""
    codes = jnp.concatenate(unpack(packed), axis=-1)[..., :head_dim]
    return codes.astype(jnp.float32) * scale.astype(jnp.float32)[..., None]


def _quantize_xla(x: Float[Array, "*n D"]) -> tuple[UInt8[Array, "*n P"], Float16[Array, "*n"]]:
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1)
    scale = jnp.where(largest > 0, jnp.maximum(largest / 7.0, SMALLEST_SCALE), 1.0).astype(jnp.float16)
    codes = jnp.clip(jnp.round(x / scale.astype(jnp.float32)[..., None]), -7, 7).astype(jnp.int8)
    return pack(codes), scale
