"""`quantize` as a Pallas Triton kernel: one program for each block of vectors.

A vector is read as its two halves of P = ceil(D/2) dimensions, which is how its codes share bytes: nothing is
interleaved, and widths that are no power of two need a mask only.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float16, UInt8

from jaxkv.ops.int4 import SMALLEST_SCALE, packed_width
from jaxkv.pallas import triton
from jaxkv.pallas.configs import Config, load_config
from jaxkv.pallas.halves import Halves


def quantize_triton(
    x: Float[Array, "*n D"], *, interpret: bool = False, config: Config | None = None
) -> tuple[UInt8[Array, "*n P"], Float16[Array, "*n"]]:
    """See `jaxkv.ops.quantize`; `config` overrides the stored block sizes of this device."""
    *outer, d = x.shape
    vectors = math.prod(outer)
    if not vectors:  # a launch of no programs is an error
        return jnp.zeros((*outer, packed_width(d)), jnp.uint8), jnp.zeros(outer, jnp.float16)
    config = config or load_config("quantize", d)
    codes, scale = triton.launch(
        functools.partial(_kernel, block=config.block_slots, head_dim=d),
        [x.reshape(vectors, d)],
        grid=(pl.cdiv(vectors, config.block_slots),),
        out_shape=[
            jax.ShapeDtypeStruct((vectors, packed_width(d)), jnp.uint8),
            jax.ShapeDtypeStruct((vectors,), jnp.float16),
        ],
        name="jaxkv_quantize",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    return codes.reshape(*outer, -1), scale.reshape(outer)


def _kernel(x_ref: Any, codes_ref: Any, scale_ref: Any, *, block: int, head_dim: int) -> None:
    halves = Halves(head_dim)
    vectors = pl.program_id(0) * block + jnp.arange(block)
    real = vectors < x_ref.shape[0]
    x = [half.astype(jnp.float32) for half in halves.load(x_ref, (vectors[:, None],), real)]
    largest = jnp.maximum(*[jnp.max(jnp.abs(half), axis=1) for half in x])
    scale = jnp.where(largest > 0, jnp.maximum(largest / 7.0, SMALLEST_SCALE), 1.0).astype(jnp.float16)
    lower, upper = [_codes(half, scale.astype(jnp.float32)[:, None]) & 0xF for half in x]
    packed = (lower | (upper << 4)).astype(jnp.uint8)
    index = (vectors[:, None], halves.dims[None, :])
    triton.store(codes_ref.at[*index], packed, mask=real[:, None] & halves.inside[0][None, :])
    triton.store(scale_ref.at[vectors], scale, mask=real)


def _codes(x: Array, scale: Array) -> Array:
    """Quotients in [-7, 7], rounded to the nearest integer, ties to even; Triton lowers floor, but not round."""
    quotient = jnp.clip(x / scale, -7.0, 7.0)
    whole = jnp.floor(quotient)
    rest = quotient - whole
    code = whole.astype(jnp.int32)
    odd = (code & 1) == 1
    return code + ((rest > 0.5) | ((rest == 0.5) & odd)).astype(jnp.int32)
