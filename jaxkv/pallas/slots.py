"""What the kernels over numbered slots share: tiles of queries, tiles of slots, and the probabilities between them.

Slots are numbered over a layer's partitions, [high | low | recent]. A tile of slots may come from all three: each
partition is read under a mask of the slots that lie in it and are occupied, which costs instructions and no memory
traffic for the others, and the parts add up.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jaxkv.ops.layer_kv import DensePart, LayerKV, LowPart
from jaxkv.ops.partials import group_queries, probabilities
from jaxkv.pallas import triton
from jaxkv.pallas.configs import Config
from jaxkv.pallas.halves import Halves


class Queries(NamedTuple):
    """The queries of a KV head, M = (G, T): arrays outside a kernel, refs inside."""

    q: Any  # [B, K, M, D]
    position: Any  # [B, M]
    lse: Any  # [B, K, M]


class QueryTile(NamedTuple):
    """Some queries of one row and KV head, in a kernel."""

    q: list[Array]  # two halves
    position: Array
    lse: Array
    index: Array  # in M
    real: Array  # inside M


def grouped(
    q: Float[Array, "B T H D"], q_position: Int[Array, "B T"], lse: Float[Array, "B T H"], kv_heads: int
) -> Queries:
    """Queries as a kernel reads them."""
    position = jnp.tile(q_position, (1, q.shape[2] // kv_heads))
    return Queries(group_queries(q, kv_heads), position, group_queries(lse[..., None], kv_heads)[..., 0])


def tile_rows(queries: int, config: Config) -> int:
    """Rows of a tile for M queries: no fewer than a dot needs, no more than are configured."""
    return min(max(triton.MINIMUM_DOT, pl.next_power_of_2(queries)), config.query_rows)


def nonempty_parts(layer: LayerKV) -> list[DensePart | LowPart]:
    """The partitions that have slots, in the order of their numbers; a kernel cannot take an array without elements."""
    return [part for part in (layer.high, layer.low, layer.recent) if part.position.shape[1]]


def read_queries(refs: Queries, row: Array, head: Array, index: Array, halves: Halves, dtype: Any) -> QueryTile:
    """The queries `index` of a row and KV head; those behind the last see nothing."""
    real = index < refs.q.shape[2]
    return QueryTile(
        [half.astype(dtype) for half in halves.load(refs.q, (row, head, index[:, None]), real)],
        triton.load(refs.position.at[row, index], mask=real, other=-1),
        triton.load(refs.lse.at[row, head, index], mask=real, other=0.0),
        index,
        real,
    )


class SlotTile:
    """Numbered slots of one row and KV head, in a kernel. `position` is -1 for an empty slot and for what is none."""

    def __init__(self, parts: Sequence[Any], row: Array, head: Array, slots: Array, halves: Halves, dtype: Any) -> None:
        self._halves, self._dtype = halves, dtype
        self._parts: list[tuple[Any, tuple[Array, ...], Array]] = []
        self.position, first = jnp.full(slots.shape, -1, jnp.int32), 0
        for part in parts:
            count = part.position.shape[1]
            local = slots - first
            position = triton.load(part.position.at[row, local], mask=(local >= 0) & (local < count), other=-1)
            self._parts.append((part, (row, head, local), position >= 0))
            self.position = jnp.maximum(self.position, position)
            first += count
        self._keys, self._key_scale = self._read("k")

    def probabilities(self, queries: QueryTile, scale: float, window: int | None) -> Array:
        """Attention probabilities [rows, slots], float32."""
        lower, upper = [triton.dot(a, b.T) for a, b in zip(queries.q, self._keys, strict=True)]
        scores = (lower + upper) * scale * self._key_scale[None, :]
        at = queries.position[:, None]
        seen = (self.position >= 0)[None, :] & (self.position[None, :] <= at)
        if window is not None:
            seen &= self.position[None, :] > at - window
        return probabilities(scores, queries.lse[:, None], seen)

    def weigh(self, a: Array) -> list[Array]:
        """Sums of values, weighted by probabilities: two halves [rows, P']."""
        values, value_scale = self._read("v")
        weights = (a * value_scale[None, :]).astype(self._dtype)
        return [triton.dot(weights, half) for half in values]

    def _read(self, name: str) -> tuple[list[Array], Array]:
        """The halves of all slots' vectors, codes where they are INT4, and the factors that make values of them."""
        total: list[Array] = []
        scale = jnp.ones(self.position.shape, jnp.float32)
        for part, (row, head, local), there in self._parts:
            index = (row, head, local[:, None])
            if isinstance(part, LowPart):
                # Codes are exact in 16 bits, scaled values would not be.
                vectors = self._halves.load_int4(getattr(part, f"{name}_codes"), index, there)
                stored = getattr(part, f"{name}_scale").at[row, head, local]
                scale = triton.load(stored, mask=there, other=1.0).astype(jnp.float32)
            else:
                vectors = self._halves.load(getattr(part, name), index, there)
            vectors = [half.astype(self._dtype) for half in vectors]
            total = [a + b for a, b in zip(total, vectors, strict=True)] if total else vectors
        return total, scale
