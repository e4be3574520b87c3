"""The one module that imports Pallas Mosaic GPU: what the kernels use of it, and how they are launched.

Mosaic GPU addresses Hopper directly: asynchronous copies (TMA) to shared memory and `wgmma` on swizzled tiles. JAX
calls its API unstable. What is used here means the same on 0.10.2, 0.11.2 and 0.12.0; the interpreter came with 0.11.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

try:
    from jax.experimental.pallas import mosaic_gpu as _mosaic_gpu

    plgpu: Any = _mosaic_gpu
    _MISSING = None
except ImportError as error:  # a package that JAX does not require (absl), or a build without the backend
    plgpu = None
    _MISSING = str(error)

DTYPES: Final = ("bfloat16", "float16")
ROWS: Final = 64  # rows of a wgmma
MAXIMUM_WIDTH: Final = 128  # beyond, the accumulators of one warpgroup spill out of its registers


def obstacle(*, interpret: bool, on: str, head_dim: int, rows: int, dtypes: Sequence[Any]) -> str | None:
    """Why a kernel cannot run; None when it can.

    Args:
      interpret: run by the interpreter instead of the GPU of architecture `on`.
      head_dim: the head width, whose halves are multiples of 16 (the smallest swizzle of two-byte numbers).
      rows: queries that share a KV head.
      dtypes: of queries and cache, equal.
    """
    if plgpu is None:
        return f"this installation of JAX {jax.__version__} lacks Pallas Mosaic GPU ({_MISSING})"
    if interpret and not hasattr(plgpu, "InterpretGPUParams"):
        return f"JAX {jax.__version__} has no interpreter for Mosaic GPU, 0.11 has"
    if not interpret and on != "sm_90":
        return f"wgmma is Hopper's (sm_90) and this is {on}"
    if head_dim % 32 or not 32 <= head_dim <= MAXIMUM_WIDTH:
        return f"head width {head_dim} is no multiple of 32 up to {MAXIMUM_WIDTH}"
    if rows > ROWS:
        return f"{rows} queries share a KV head, {ROWS} fit"
    names = sorted({str(jnp.dtype(dtype)) for dtype in dtypes})
    if len(names) > 1 or names[0] not in DTYPES:
        return f"queries and cache are {' and '.join(names)}; both must be {' or both '.join(DTYPES)}"
    return None


def swizzle(width: int) -> int:
    """Bytes of the widest swizzle whose tiles of two-byte numbers divide `width`."""
    return next(size for size in (128, 64, 32) if width % (size // 2) == 0)


def tiled(shape: tuple[int, ...], dtype: Any, size: int) -> Any:
    """Matrices in shared memory, laid out for `wgmma` and TMA with a swizzle of `size` bytes."""
    tile = (8, size // jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform(tile), plgpu.SwizzleTransform(size)))


def by_row(x: Array) -> Array:
    """A vector with one entry for each row of a `wgmma` accumulator."""
    return plgpu.layout_cast(x, plgpu.Layout.WGMMA.reduce(1))


def by_column(x: Array) -> Array:
    """A vector with one entry for each column of a `wgmma` accumulator."""
    return plgpu.layout_cast(x, plgpu.Layout.WGMMA.reduce(0))


def accumulator(x: Array) -> Array:
    """A matrix in the layout of a `wgmma` accumulator."""
    return plgpu.layout_cast(x, plgpu.Layout.WGMMA)


def dot(a: Any, b: Any, columns: int) -> Array:
    """[ROWS, columns] of a matrix [ROWS, N] and b [N, columns] in shared memory, in float32."""

    def multiply(result: Any) -> Array:
        plgpu.wgmma(result, a, b)
        return result[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, columns), jnp.float32))


def launch(
    kernel: Callable[..., None],
    arguments: Sequence[Array],
    *,
    grid: dict[str, int],
    out_type: Any,
    scratch_types: Sequence[Any],
    name: str,
    interpret: bool,
) -> Any:
    """Run `kernel`, one warpgroup a program, on refs of arguments, outputs and scratch.

    Args:
      grid: the names and sizes of the programs' axes.
      interpret: run it on any device, which checks its numbers, its bounds and its synchronisation (reads and writes of
        shared memory that race raise), and not that it compiles.
    """
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        # Layouts are inferred for a warpgroup; by lane is the default of 0.10.2 and lowers fewer operations.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name=name,
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )(*arguments)
