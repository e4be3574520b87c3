"""How tokens move through the KV state: append, expire, fill, compact, grow, rows in and out, snapshots.

All functions are pure and jittable with static shapes; donate the state to update it in place. A token that finds no
free slot, or whose INT4 scale leaves FP16's range, marks its row's `fault`; nothing is dropped silently.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int8

from jaxkv.errors import CapacityError
from jaxkv.ops.quantize import quantize
from jaxkv.state.actions import HIGH, LOW
from jaxkv.state.kv_state import (
    EMPTY,
    FAULT_CAPACITY,
    FAULT_SCALE,
    KVState,
    LayerArrays,
    fault_code,
    pad_capacity,
    used_slots,
)

RowIndex = int | Int[Array, ""]


def append(
    state: KVState,
    k: Sequence[Float[Array, "B K D"]],
    v: Sequence[Float[Array, "B K D"]],
    active: Bool[Array, "B"],
    after: Float[Array, ""] | None = None,
) -> KVState:
    """Append one token, given its keys and values in every layer, to the active rows.

    The token that it pushes out of the recent window expires: HIGH is moved, LOW quantised and moved, RELEASE dropped;
    sinks are always HIGH. The new token's pending action is HIGH until it is decided. Inactive rows are unchanged.

    Args:
      k, v: the token's keys and values, one array per layer.
      active: rows that append.
      after: a number that is known once everything has read the state, such as a logit. The writes wait for it;
        without that order XLA copies what it is about to overwrite.
    """
    rows = jnp.arange(state.rows)
    slot = state.length % state.window
    position = state.recent_position[rows, slot]
    leaving = active & (position >= 0)
    action = jnp.where((position < state.sinks)[:, None], jnp.int8(HIGH), state.pending[rows, slot])
    fault = state.fault
    moves: dict[int, list[_Move]] = {HIGH: [], LOW: []}
    for c in range(len(state.groups)):
        for kind, map_ in ((HIGH, state.high_position[c]), (LOW, state.low_position[c])):
            capacity, free = map_.shape[1], used_slots(map_)
            moving = leaving & (action[:, c] == kind)
            fault = _mark(fault, moving & (free >= capacity), FAULT_CAPACITY, c)
            moves[kind].append(_Move(free, moving & (free < capacity)))

    # All layers at once: a few operations on [L, B, K, D] instead of a few a layer.
    old = {
        name: jnp.stack([_read(getattr(arrays, name), slot) for arrays in state.layers])
        for name in ("recent_k", "recent_v")
    }
    new = {"recent_k": jnp.stack(list(k)), "recent_v": jnp.stack(list(v))}
    values = {name: jnp.where(active[:, None, None], x.astype(old[name].dtype), old[name]) for name, x in new.items()}
    values |= {"high_k": old["recent_k"], "high_v": old["recent_v"]}
    if any(state.low_capacity):
        stored, overflow = _quantized(old["recent_k"], old["recent_v"])
        values |= stored
        for layer in range(len(state.layers)):
            moving = moves[LOW][state.group_of(layer)].moving
            fault = _mark(fault, moving & overflow[layer].any(axis=1), FAULT_SCALE, layer)

    writes = []
    for layer, arrays in enumerate(state.layers):
        c = state.group_of(layer)
        for field in dataclasses.fields(arrays):
            target = getattr(arrays, field.name)
            if target.shape[2]:
                kind = {"h": HIGH, "l": LOW}.get(field.name[0])
                move = _Move(slot, active) if kind is None else moves[kind][c]
                writes.append(_Write(layer, field.name, target, move, values[field.name][layer]))
    written = _write(writes, active, after)
    layers = [
        dataclasses.replace(arrays, **{w.name: x for w, x in zip(writes, written, strict=True) if w.layer == layer})
        for layer, arrays in enumerate(state.layers)
    ]

    def moved(map_: Array, move: _Move) -> Array:
        return map_.at[rows, jnp.where(move.moving, move.slot, map_.shape[1])].set(position, mode="drop")

    return dataclasses.replace(
        state,
        layers=tuple(layers),
        high_position=tuple(map(moved, state.high_position, moves[HIGH])),
        low_position=tuple(map(moved, state.low_position, moves[LOW])),
        recent_position=state.recent_position.at[rows, slot].set(jnp.where(active, state.length, position)),
        pending=state.pending.at[rows, slot].set(jnp.where(active[:, None], jnp.int8(HIGH), state.pending[rows, slot])),
        length=state.length + active.astype(jnp.int32),
        fault=fault,
    )


def decide(
    pending: Int8[Array, "B W C"], length: Int[Array, "B"], actions: Int8[Array, "B C"], active: Bool[Array, "B"]
) -> Int8[Array, "B W C"]:
    """`KVState.pending` with the newest token's action decided, for when it leaves the recent window.

    Takes the two arrays rather than the state, so that it can run apart from the forward pass that owns the state.
    """
    window = pending.shape[1]
    slot = jnp.where(active & (length > 0), (length - 1) % window, window)
    return pending.at[jnp.arange(pending.shape[0]), slot].set(actions, mode="drop")


def set_pending(state: KVState, actions: Int8[Array, "B C"], active: Bool[Array, "B"]) -> KVState:
    """Decide the action of the newest token of the active rows."""
    return dataclasses.replace(state, pending=decide(state.pending, state.length, actions, active))


def fill_row(
    state: KVState,
    row: RowIndex,
    k: Sequence[Float[Array, "T K D"]],
    v: Sequence[Float[Array, "T K D"]],
    actions: Int8[Array, "T C"],
    length: RowIndex,
) -> KVState:
    """Replace a row by a prompt's tokens: keep, quantise or release each by its action (PASK B.4).

    Sinks and the newest W tokens are kept at full precision whatever their action; the latter leave the ring with the
    action given here. T is padded: tokens from `length` on are ignored.
    """
    tokens = k[0].shape[0]
    index = jnp.arange(tokens)
    window = state.window
    long_range = index < length - window
    sink = index < state.sinks
    protected = jnp.where(sink[:, None], jnp.int8(HIGH), actions)
    fault = jnp.int32(0)

    orders: list[tuple[tuple[Array, Array], tuple[Array, Array]]] = []
    for c in range(len(state.groups)):
        pair = []
        for kind, map_ in ((HIGH, state.high_position[c]), (LOW, state.low_position[c])):
            chosen = long_range & (protected[:, c] == kind)
            count = jnp.sum(chosen, dtype=jnp.int32)
            fault = _mark(fault, count > map_.shape[1], FAULT_CAPACITY, c)
            pair.append(_front(chosen, count, map_.shape[1]))
        orders.append((pair[0], pair[1]))

    # Slot s of the ring holds the newest position that is s modulo W; a short prompt leaves it below zero.
    ring = jnp.arange(window)
    newest = length - 1 - (length - 1 - ring) % window
    ring_index = jnp.clip(newest, 0, tokens - 1)

    layers = []
    for i, arrays in enumerate(state.layers):
        (high, _), (low, low_valid) = orders[state.group_of(i)]
        rows_in = {"recent_k": _rows(k[i], ring_index), "recent_v": _rows(v[i], ring_index)}
        if high.shape[0]:
            rows_in |= {"high_k": _rows(k[i], high), "high_v": _rows(v[i], high)}
        if low.shape[0]:
            packed, overflow = _quantized(_rows(k[i], low), _rows(v[i], low))
            fault = _mark(fault, jnp.any(overflow & low_valid), FAULT_SCALE, i)
            rows_in |= packed
        layers.append(
            dataclasses.replace(
                arrays, **{name: _set_row(getattr(arrays, name), row, x) for name, x in rows_in.items()}
            )
        )

    def positions(map_: Array, order: tuple[Array, Array]) -> Array:
        return _set_row(map_, row, jnp.where(order[1], order[0], EMPTY).astype(jnp.int32))

    return dataclasses.replace(
        state,
        layers=tuple(layers),
        high_position=tuple(positions(m, orders[c][0]) for c, m in enumerate(state.high_position)),
        low_position=tuple(positions(m, orders[c][1]) for c, m in enumerate(state.low_position)),
        recent_position=_set_row(state.recent_position, row, jnp.where(newest >= 0, newest, EMPTY)),
        pending=_set_row(state.pending, row, protected[ring_index]),
        length=state.length.at[row].set(length),
        fault=state.fault.at[row].set(fault),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Keep:
    """Which slots survive `compact`: one mask per layer group and partition, one for the ring."""

    high: tuple[Bool[Array, "B _"], ...]
    low: tuple[Bool[Array, "B _"], ...]
    recent: Bool[Array, "B W"]


def keep_positions(state: KVState, mask: Bool[Array, "B N"]) -> Keep:
    """The `Keep` of absolute positions: p of row b stays, in every group, where `mask[b, p]`; so do all from N on."""

    def look_up(position: Array) -> Array:
        inside = (position >= 0) & (position < mask.shape[1])
        found = jnp.take_along_axis(mask, jnp.clip(position, 0, mask.shape[1] - 1), axis=1)
        return jnp.where(inside, found, position >= 0)

    return Keep(
        high=tuple(look_up(p) for p in state.high_position),
        low=tuple(look_up(p) for p in state.low_position),
        recent=look_up(state.recent_position),
    )


def compact(state: KVState, keep: Keep) -> KVState:
    """Drop all slots outside `keep`: one index set for keys, values, scales and positions, order kept.

    `length` stays: positions are absolute, and rotary embeddings use tokens seen.
    """

    def order_of(mask: Array, position: Array) -> tuple[Array, Array]:
        mask = mask & (position != EMPTY)
        order = jnp.argsort(~mask, axis=1, stable=True)
        survivors = jnp.arange(mask.shape[1])[None] < jnp.sum(mask, axis=1)[:, None]
        return order, jnp.where(survivors, jnp.take_along_axis(position, order, axis=1), EMPTY)

    high = [order_of(m, p) for m, p in zip(keep.high, state.high_position, strict=True)]
    low = [order_of(m, p) for m, p in zip(keep.low, state.low_position, strict=True)]
    layers = []
    for i, arrays in enumerate(state.layers):
        c = state.group_of(i)
        changes = {}
        for names, order in (
            (("high_k", "high_v"), high[c][0]),
            (("low_k_codes", "low_v_codes", "low_k_scale", "low_v_scale"), low[c][0]),
        ):
            for name in names:
                x = getattr(arrays, name)
                index = order[:, None, :, None] if x.ndim == 4 else order[:, None, :]
                changes[name] = jnp.take_along_axis(x, index, axis=2)
        layers.append(dataclasses.replace(arrays, **changes))
    return dataclasses.replace(
        state,
        layers=tuple(layers),
        high_position=tuple(p for _, p in high),
        low_position=tuple(p for _, p in low),
        recent_position=jnp.where(keep.recent, state.recent_position, EMPTY),
    )


def insert_row(state: KVState, row: RowIndex, source: KVState) -> KVState:
    """Put row 0 of `source` (same capacities, window and sinks) into row `row` of `state`."""
    if source.high_capacity != state.high_capacity or source.low_capacity != state.low_capacity:
        raise CapacityError(
            f"row with capacities {source.high_capacity}/{source.low_capacity} does not fit a state of "
            f"{state.high_capacity}/{state.low_capacity}; grow one of them first"
        )
    if (source.window, source.sinks, source.groups) != (state.window, state.sinks, state.groups):
        raise CapacityError("row and state differ in window, sinks or layer groups; build both from one policy")
    return jax.tree.map(lambda x, new: _set_row(x, row, new[0]), state, source)


def reset_row(state: KVState, row: RowIndex) -> KVState:
    """Empty a row. Its arrays keep their bytes; no slot refers to them."""
    return dataclasses.replace(
        state,
        high_position=tuple(p.at[row].set(EMPTY) for p in state.high_position),
        low_position=tuple(p.at[row].set(EMPTY) for p in state.low_position),
        recent_position=state.recent_position.at[row].set(EMPTY),
        pending=state.pending.at[row].set(jnp.int8(HIGH)),
        length=state.length.at[row].set(0),
        fault=state.fault.at[row].set(0),
    )


def grow(state: KVState, high_slots: Sequence[int], low_slots: Sequence[int]) -> KVState:
    """A state with room for at least `high_slots` and `low_slots` a row in each group; never smaller than now.

    Old and new arrays exist together while it runs: the peak is both.
    """
    high = [max(pad_capacity(want), have) for want, have in zip(high_slots, state.high_capacity, strict=True)]
    low = [max(pad_capacity(want), have) for want, have in zip(low_slots, state.low_capacity, strict=True)]

    def wider(x: Array, axis: int, size: int, value: int = 0) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, size - x.shape[axis])
        return jnp.pad(x, widths, constant_values=value) if size > x.shape[axis] else x

    def layer(i: int, arrays: LayerArrays) -> LayerArrays:
        c = state.group_of(i)
        size = {"high_k": high, "high_v": high}
        return dataclasses.replace(
            arrays,
            **{
                f.name: wider(getattr(arrays, f.name), 2, size.get(f.name, low)[c], int(f.name.endswith("scale")))
                for f in dataclasses.fields(arrays)
                if not f.name.startswith("recent")
            },
        )

    return dataclasses.replace(
        state,
        layers=tuple(layer(i, arrays) for i, arrays in enumerate(state.layers)),
        high_position=tuple(wider(p, 1, high[c], EMPTY) for c, p in enumerate(state.high_position)),
        low_position=tuple(wider(p, 1, low[c], EMPTY) for c, p in enumerate(state.low_position)),
    )


@jax.jit
def snapshot(state: Any) -> Any:
    """A copy that survives the donation of `state` (a KVState, or any pytree that holds one): keep it to roll back.

    Restoring is going on from a copy of the snapshot, so that one snapshot serves several attempts.
    """
    return jax.tree.map(jnp.copy, state)


restore = snapshot


class _Move(NamedTuple):
    """A slot of each row, and the rows in which something is written there."""

    slot: Int[Array, "B"]
    moving: Bool[Array, "B"]


class _Write(NamedTuple):
    """One array of one layer, what to write, and where: x[b, :, slot[b]] = value[b]."""

    layer: int
    name: str
    x: Array
    move: _Move
    value: Array


def _write(writes: Sequence[_Write], active: Bool[Array, "B"], after: Array | None) -> tuple[Array, ...]:
    """Carry out all writes in one loop over rows; a row in which nothing moves writes back what it holds.

    XLA does a dynamic-update-slice in place inside a loop whose length it does not know. A scatter, or the same update
    outside a loop, is duplicated into its readers, with a copy of the array for each.
    """
    rows = jnp.where(jnp.any(active), active.shape[0], 0)
    if after is not None:
        # No number is above infinity: this changes nothing, but makes the loop wait for `after`.
        rows = jnp.where(after > jnp.inf, 0, rows)

    def body(row: Array, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(_write_row(x, row, w) for x, w in zip(arrays, writes, strict=True))

    return lax.fori_loop(0, rows, body, tuple(w.x for w in writes))


def _write_row(x: Array, row: Array, write: _Write) -> Array:
    start = (row, 0, write.move.slot[row]) + (0,) * (x.ndim - 3)
    old = lax.dynamic_slice(x, start, (1, x.shape[1], 1, *x.shape[3:]))
    new = jnp.where(write.move.moving[row], write.value[row].astype(x.dtype)[None, :, None], old)
    return lax.dynamic_update_slice(x, new, start)


def _read(x: Array, slot: Int[Array, "B"]) -> Array:
    """x[b, :, slot[b]]"""
    return jax.vmap(lambda row, s: lax.dynamic_index_in_dim(row, s, axis=1, keepdims=False))(x, slot)


def _set_row(x: Array, row: RowIndex, value: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x, value.astype(x.dtype), row, axis=0)


def _rows(x: Float[Array, "T K D"], index: Int[Array, "S"]) -> Float[Array, "K S D"]:
    return jnp.take(x, index, axis=0).swapaxes(0, 1)


def _front(mask: Bool[Array, "T"], count: Int[Array, ""], capacity: int) -> tuple[Int[Array, "S"], Bool[Array, "S"]]:
    """Indices of the chosen tokens in order, as the front of `capacity` slots, and which of these slots are used."""
    order = jnp.argsort(~mask, stable=True)
    tokens = mask.shape[0]
    order = order[:capacity] if capacity <= tokens else jnp.pad(order, (0, capacity - tokens))
    return order, jnp.arange(capacity) < count


def _quantized(k: Array, v: Array) -> tuple[dict[str, Array], Array]:
    """What the low partition stores of some keys and values, and which vectors have a scale beyond FP16."""
    k_codes, k_scale = quantize(k)
    v_codes, v_scale = quantize(v)
    stored = {"low_k_codes": k_codes, "low_v_codes": v_codes, "low_k_scale": k_scale, "low_v_scale": v_scale}
    return stored, jnp.isinf(k_scale) | jnp.isinf(v_scale)


def _mark(fault: Array, bad: Array, kind: int, where: int) -> Array:
    """The first fault of a row stays."""
    return jnp.where((fault == 0) & bad, jnp.int32(fault_code(kind, where)), fault)
