"""Small kernels that a gate has to refuse, and one that it has to accept."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxkv.pallas import triton

OPERANDS = (jax.ShapeDtypeStruct((1 << 16,), jnp.float32),)


def launched(kernel, num_warps=1):
    """A kernel with one input and one output of any size, as a function."""
    return lambda x: triton.launch(
        kernel,
        [x],
        grid=(2,),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        name="jaxkv_probe",
        num_warps=num_warps,
        num_stages=1,
        interpret=False,
    )[0]


def small(x_ref, o_ref):
    index = jnp.arange(64)
    triton.store(o_ref.at[index], triton.load(x_ref.at[index]) * 2)


def sorting(x_ref, o_ref):
    index = jnp.arange(16)
    triton.store(o_ref.at[index], jnp.sort(triton.load(x_ref.at[index])))


def boolean_bound(x_ref, o_ref):
    """Lowers, with a boolean where the loop needs an int32."""
    index = jnp.arange(16)
    blocks = jnp.where(pl.program_id(0) == 0, 1, 0)

    def body(_, total):
        return total + triton.load(x_ref.at[index])

    triton.store(o_ref.at[index], jax.lax.fori_loop(0, blocks, body, jnp.zeros(16, jnp.float32)))


def spilling(x_ref, o_ref):
    """16,384 values of three arrays in the registers of one warp."""
    index = jnp.arange(1 << 14)
    a, b = triton.load(x_ref.at[index]), triton.load(x_ref.at[index + (1 << 14)])
    total = jax.lax.fori_loop(0, 8, lambda _, total: total * a + b, jnp.zeros(1 << 14, jnp.float32))
    triton.store(o_ref.at[index], total)


def multiplying(x_ref, o_ref, *, width):
    """A product of two [width, width] tiles, which Triton keeps in shared memory."""
    rows, columns = jnp.arange(width)[:, None], jnp.arange(width)[None, :]
    a = triton.load(x_ref.at[rows * width + columns]).astype(jnp.bfloat16)
    b = triton.load(x_ref.at[columns * width + rows]).astype(jnp.bfloat16)
    triton.store(o_ref.at[rows * width + columns], triton.dot(a, b))


def tile(width):
    return functools.partial(multiplying, width=width)
