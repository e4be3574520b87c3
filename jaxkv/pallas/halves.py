"""How kernels read vectors: as two halves of P = ceil(D/2) dimensions, because that is how INT4 packs them.

There is no interleaving, and widths that are no power of two need a mask only.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jaxkv.ops.int4 import packed_width
from jaxkv.pallas import triton


class Halves:
    """The dimensions of vectors of `head_dim`: made inside a kernel.

    `index` of the methods addresses the vectors, without the dimension: [N, 1] where it varies; `valid` is [N].
    """

    def __init__(self, head_dim: int) -> None:
        width = packed_width(head_dim)
        self.dims = jnp.arange(pl.next_power_of_2(width))
        self.inside = (self.dims < width, self.dims + width < head_dim)
        self._columns = (self.dims, self.dims + width)

    def load(self, ref: Any, index: tuple[Any, ...], valid: Array) -> list[Array]:
        """The halves of N vectors, [N, P'] each, P' the next power of two of P; zeros where nothing is valid."""
        return [self._at(ref, index, valid, half) for half in range(2)]

    def load_int4(self, ref: Any, index: tuple[Any, ...], valid: Array) -> list[Array]:
        """The same of packed INT4 vectors: codes in [-7, 7], int32."""
        wide = self._at(ref, index, valid, 0).astype(jnp.int32)
        return [lax.shift_right_arithmetic(lax.shift_left(wide, shift), 28) for shift in (28, 24)]

    def store(self, ref: Any, index: tuple[Any, ...], valid: Array, halves: list[Array]) -> None:
        """Write halves that have `load`'s shape."""
        for half, value in enumerate(halves):
            mask = valid[:, None] & self.inside[half][None, :]
            triton.store(ref.at[*index, self._columns[half][None, :]], value, mask=mask)

    def _at(self, ref: Any, index: tuple[Any, ...], valid: Array, half: int) -> Array:
        mask = valid[:, None] & self.inside[half][None, :]
        return triton.load(ref.at[*index, self._columns[half][None, :]], mask=mask, other=0)
