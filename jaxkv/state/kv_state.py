"""The KV state: a pytree passed in and out of every jitted function, and donated.

Every visible token is in exactly one of three places: `high` (long-range, full precision), `low` (long-range, INT4)
or `recent` (a ring of the newest W tokens, full precision, with the action that awaits each when it leaves). Each
layer has arrays of its own; the layers of a group share their actions, so the slot map — which absolute position a
slot holds — is stored once per group, and the ring's map once for all. A policy that chooses per layer uses one group
per layer. Unused slots hold position -1. In `high` and `low`, used slots are a prefix of each row.

Rows are independent: nothing written for one row is read by another.
"""

import dataclasses
from collections.abc import Sequence
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float16, Int, Int8, UInt8

from jaxkv.errors import CapacityError
from jaxkv.ops.int4 import packed_width
from jaxkv.ops.layer_kv import DensePart, LayerKV, LowPart
from jaxkv.state.actions import HIGH
from jaxkv.state.payload import KVSpec

EMPTY: Final = -1
CAPACITY_STEP: Final = 64

FAULT_SCALE: Final = 1
FAULT_CAPACITY: Final = 2
_FAULT_BASE: Final = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerArrays:
    """The arrays that one layer owns."""

    high_k: Float[Array, "B K S_high D"]
    high_v: Float[Array, "B K S_high D"]
    low_k_codes: UInt8[Array, "B K S_low P"]
    low_v_codes: UInt8[Array, "B K S_low P"]
    low_k_scale: Float16[Array, "B K S_low"]
    low_v_scale: Float16[Array, "B K S_low"]
    recent_k: Float[Array, "B K W D"]
    recent_v: Float[Array, "B K W D"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVState:
    """The KV cache of B rows.

    `pending` is the action (`state.actions`) that a token of the ring gets when the ring reuses its slot. `length`
    counts tokens seen, whatever was released since: it is the next token's absolute position. `fault` is 0, or a code
    that `describe_fault` reads; a faulted row is not to be trusted, its neighbours are.
    """

    layers: tuple[LayerArrays, ...]
    high_position: tuple[Int[Array, "B _"], ...]
    low_position: tuple[Int[Array, "B _"], ...]
    recent_position: Int[Array, "B W"]
    pending: Int8[Array, "B W C"]
    length: Int[Array, "B"]
    fault: Int[Array, "B"]
    groups: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})
    sinks: int = dataclasses.field(metadata={"static": True})

    @property
    def rows(self) -> int:
        return self.length.shape[0]

    @property
    def window(self) -> int:
        """W: the newest tokens, kept at full precision; the token being computed is not among them."""
        return self.recent_position.shape[1]

    @property
    def high_capacity(self) -> tuple[int, ...]:
        """Slots of the high partition, per group."""
        return tuple(p.shape[1] for p in self.high_position)

    @property
    def low_capacity(self) -> tuple[int, ...]:
        """Slots of the low partition, per group."""
        return tuple(p.shape[1] for p in self.low_position)

    def group_of(self, layer: int) -> int:
        """The layer group that `layer` belongs to."""
        return next(c for c, (start, stop) in enumerate(self.groups) if start <= layer < stop)

    def layer(self, index: int) -> LayerKV:
        """What layer `index` attends to."""
        arrays, c = self.layers[index], self.group_of(index)
        return LayerKV(
            high=DensePart(arrays.high_k, arrays.high_v, self.high_position[c]),
            low=LowPart(
                arrays.low_k_codes,
                arrays.low_v_codes,
                arrays.low_k_scale,
                arrays.low_v_scale,
                self.low_position[c],
            ),
            recent=DensePart(arrays.recent_k, arrays.recent_v, self.recent_position),
        )


def pad_capacity(slots: int) -> int:
    """The smallest allowed capacity that holds `slots`.

    Capacities are multiples of 64, eight sizes an octave above 512: padding wastes at most 1/8 there, and the number of
    shapes to compile for grows with the logarithm of the context.
    """
    if slots <= 0:
        return 0
    step = CAPACITY_STEP
    while slots > 16 * step:
        step *= 2
    return -(-slots // step) * step


def init_state(
    spec: KVSpec,
    *,
    rows: int,
    window: int,
    sinks: int,
    high_slots: int | Sequence[int],
    low_slots: int | Sequence[int],
    dtype: jnp.dtype | str,
) -> KVState:
    """An empty state with room for `high_slots` and `low_slots` long-range tokens a row (per group, padded upwards)."""
    if window < 1:
        raise CapacityError(f"recent window of {window} tokens; it has at least 1")
    if rows < 1:
        raise CapacityError(f"{rows} rows; a state has at least 1")
    groups = len(spec.groups)
    high = [pad_capacity(s) for s in ([high_slots] * groups if isinstance(high_slots, int) else high_slots)]
    low = [pad_capacity(s) for s in ([low_slots] * groups if isinstance(low_slots, int) else low_slots)]
    heads, dim, width = spec.num_kv_heads, spec.head_dim, packed_width(spec.head_dim)

    def arrays(c: int) -> LayerArrays:
        return LayerArrays(
            high_k=jnp.zeros((rows, heads, high[c], dim), dtype),
            high_v=jnp.zeros((rows, heads, high[c], dim), dtype),
            low_k_codes=jnp.zeros((rows, heads, low[c], width), jnp.uint8),
            low_v_codes=jnp.zeros((rows, heads, low[c], width), jnp.uint8),
            low_k_scale=jnp.ones((rows, heads, low[c]), jnp.float16),
            low_v_scale=jnp.ones((rows, heads, low[c]), jnp.float16),
            recent_k=jnp.zeros((rows, heads, window, dim), dtype),
            recent_v=jnp.zeros((rows, heads, window, dim), dtype),
        )

    return KVState(
        layers=tuple(arrays(c) for c, (start, stop) in enumerate(spec.groups) for _ in range(start, stop)),
        high_position=tuple(jnp.full((rows, s), EMPTY, jnp.int32) for s in high),
        low_position=tuple(jnp.full((rows, s), EMPTY, jnp.int32) for s in low),
        recent_position=jnp.full((rows, window), EMPTY, jnp.int32),
        pending=jnp.full((rows, window, groups), HIGH, jnp.int8),
        length=jnp.zeros((rows,), jnp.int32),
        fault=jnp.zeros((rows,), jnp.int32),
        groups=spec.groups,
        sinks=sinks,
    )


def allocated_bytes(state: KVState) -> int:
    """Bytes of all arrays of the state: padding, scales and slot maps included."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def used_slots(position: Int[Array, "B S"]) -> Int[Array, "B"]:
    """Occupied slots per row of a slot map."""
    return jnp.sum(position != EMPTY, axis=1, dtype=jnp.int32)


def fault_code(kind: int, where: int) -> int:
    """A fault of `kind` at a layer (scale) or a layer group (capacity), as stored in `KVState.fault`."""
    return _FAULT_BASE * where + kind


def describe_fault(code: int) -> str:
    """The error message of a fault code."""
    kind, where = code % _FAULT_BASE, code // _FAULT_BASE
    if kind == FAULT_SCALE:
        return (
            f"layer {where}: a key or value is too large for INT4, its scale exceeds FP16's 65,504; "
            "keep this layer's tokens high (policy 'all_high') or use another model"
        )
    if kind == FAULT_CAPACITY:
        return (
            f"layer group {where}: no free slot for a token that left the recent window; grow the state before stepping"
        )
    raise ValueError(f"{code} is not a fault code")
