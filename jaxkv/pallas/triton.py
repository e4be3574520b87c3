"""The one module that imports Pallas Triton: what the kernels use of it, and how they are launched.

JAX deprecates this backend in favour of Mosaic GPU (Hopper and newer). It is the one that compiles for A100, L40S and
ROCm, so the kernels are written for it, and a Mosaic GPU kernel goes beside them as another implementation.
"""

import warnings
from collections.abc import Callable
from typing import Any, Final

import jax
from jax import lax
from jax.experimental import pallas as pl

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*Triton.*", category=DeprecationWarning)
    from jax.experimental.pallas import triton as _triton
import jax.numpy as jnp
from jaxtyping import Array

load = _triton.load
store = _triton.store
MINIMUM_DOT: Final = 16  # rows, columns and depth of a Triton dot
MAXIMUM_HEAD_DIM: Final = 256
DTYPES: Final = ("float32", "bfloat16", "float16")


def obstacle(head_dim: int, *dtypes: Any, least: int = 2 * MINIMUM_DOT) -> str | None:
    """Why a kernel for head widths from `least` cannot handle this one, or a dtype; None when it can."""
    if not least <= head_dim <= MAXIMUM_HEAD_DIM:
        return f"head width {head_dim} is outside {least} to {MAXIMUM_HEAD_DIM}"
    other = [str(dtype) for dtype in dtypes if str(dtype) not in DTYPES]
    return f"dtype {other[0]} is not one of {', '.join(DTYPES)}" if other else None


def dot(a: Array, b: Array) -> Array:
    """[M, N] of a [M, D] and b [D, N], accumulated in float32; float32 operands are not rounded to TF32."""
    return _triton.dot(a, b, precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None)


def launch(
    kernel: Callable[..., None],
    arguments: list[Any],
    *,
    grid: tuple[int, ...],
    out_shape: Any,
    name: str,
    num_warps: int,
    num_stages: int,
    interpret: bool,
) -> Any:
    """Run `kernel` on whole arrays in device memory: it gets a ref for each array of its arguments (pytrees) and
    outputs, and addresses them.

    `interpret` runs it as XLA operations on any backend, which checks its numbers, not that it compiles.
    """
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=jax.tree.map(lambda _: pl.no_block_spec, arguments),
        out_specs=jax.tree.map(lambda _: pl.no_block_spec, out_shape),
        out_shape=out_shape,
        # Without parameters of this class the kernel would go to Mosaic GPU on some releases of JAX.
        compiler_params=_triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )(*arguments)
