"""Tokens moving through the state, against a host model of where each one must be."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxkv.errors import CapacityError
from jaxkv.ops.quantize import quantize
from jaxkv.state.actions import HIGH, LOW, RELEASE
from jaxkv.state.kv_state import allocated_bytes, describe_fault, init_state, pad_capacity
from jaxkv.state.payload import KVSpec
from jaxkv.state.transfer import (
    append,
    compact,
    fill_row,
    grow,
    insert_row,
    keep_positions,
    reset_row,
    restore,
    set_pending,
    snapshot,
)

SPEC = KVSpec(num_layers=3, num_kv_heads=2, head_dim=6)
ROWS, WINDOW, SINKS = 3, 5, 2
LAYERS = range(SPEC.num_layers)


def kv_of(position: np.ndarray, layer: int, row: np.ndarray) -> np.ndarray:
    """Deterministic key of (position, layer, row): [..., K, D]; the value is its negative."""
    base = np.sin(np.arange(12).reshape(2, 6) * 0.37 + 1.3 * layer)
    return (base * (1 + 0.01 * position[..., None, None]) + 0.1 * row[..., None, None]).astype(np.float32)


def new_state(high: int = 128, low: int = 128, dtype: str = "float32", rows: int = ROWS):
    return init_state(SPEC, rows=rows, window=WINDOW, sinks=SINKS, high_slots=high, low_slots=low, dtype=dtype)


@functools.partial(jax.jit, donate_argnums=0)
def step(state, active, actions):
    position = state.length
    rows = jnp.arange(state.rows)
    k = [_traced_kv(position, i, rows) for i in LAYERS]
    state = append(state, k, [-x for x in k], active)
    return set_pending(state, actions, active)


def _traced_kv(position, layer, row):
    base = jnp.sin(jnp.arange(12).reshape(2, 6) * 0.37 + 1.3 * layer)
    return base * (1 + 0.01 * position[:, None, None]) + 0.1 * row[:, None, None]


jit_compact = jax.jit(lambda state, mask: compact(state, keep_positions(state, mask)), donate_argnums=0)
jit_reset = jax.jit(reset_row, donate_argnums=0)
jit_insert = jax.jit(insert_row, donate_argnums=0)
jit_fill = jax.jit(fill_row, donate_argnums=0)


class Twin:
    """Plain Python account of one row: position -> action per group, released and dropped ones gone."""

    def __init__(self):
        self.length, self.ring, self.kept = 0, {}, [{} for _ in SPEC.groups]

    def append(self, actions):
        old = self.length - WINDOW
        if old in self.ring:
            self.leave(old, self.ring.pop(old))
        self.ring[self.length] = list(actions)
        self.length += 1

    def leave(self, position, actions):
        for c, action in enumerate(actions):
            action = HIGH if position < SINKS else action
            if action != RELEASE:
                self.kept[c][position] = action

    def drop(self, positions):
        for p in positions:
            self.ring.pop(p, None)
            for kept in self.kept:
                kept.pop(p, None)

    def fill(self, actions):
        self.__init__()
        self.length = len(actions)
        for p, a in enumerate(actions):
            a = [HIGH] * 3 if p < SINKS else list(a)
            if p >= self.length - WINDOW:
                self.ring[p] = a
            else:
                self.leave(p, a)


def check_row(state, row: int, twin: Twin) -> None:
    """Maps, order, pending actions and stored numbers of one row are what the twin says."""
    state = jax.device_get(state)
    assert int(state.fault[row]) == 0
    assert int(state.length[row]) == twin.length
    ring = np.asarray(state.recent_position)[row]
    assert sorted(p for p in ring if p >= 0) == sorted(twin.ring)
    for slot, p in enumerate(ring):
        if p >= 0:
            assert p % WINDOW == slot
            assert np.asarray(state.pending)[row, slot].tolist() == list(twin.ring[p])
    for c, (start, stop) in enumerate(state.groups):
        high = np.asarray(state.high_position[c])[row]
        low = np.asarray(state.low_position[c])[row]
        for positions, action in ((high, HIGH), (low, LOW)):
            used = positions[positions >= 0]
            assert (positions[: len(used)] == used).all(), "used slots are a prefix"
            assert sorted(used) == sorted(p for p, a in twin.kept[c].items() if a == action)
            assert (np.diff(used) > 0).all(), "order kept"
        for layer in range(start, stop):
            arrays = state.layers[layer]
            row_of = np.full(1, row)
            for positions, k, v in (
                (high, arrays.high_k, arrays.high_v),
                (ring, arrays.recent_k, arrays.recent_v),
            ):
                slots = np.flatnonzero(positions >= 0)
                want = kv_of(positions[slots], layer, row_of).swapaxes(0, 1)
                np.testing.assert_allclose(k[row][:, slots], want, rtol=1e-5, atol=1e-6)
                np.testing.assert_allclose(v[row][:, slots], -want, rtol=1e-5, atol=1e-6)
            slots = np.flatnonzero(low >= 0)
            want = kv_of(low[slots], layer, row_of).swapaxes(0, 1)
            for codes, scale, sign in (
                (arrays.low_k_codes, arrays.low_k_scale, 1),
                (arrays.low_v_codes, arrays.low_v_scale, -1),
            ):
                packed, scale = codes[row][:, slots].astype(int), scale[row][:, slots].astype(np.float32)
                nibbles = np.concatenate([packed & 15, packed >> 4], -1)
                back = np.where(nibbles > 7, nibbles - 16, nibbles) * scale[..., None]
                assert (np.abs(back - sign * want) <= 0.51 * scale[..., None]).all()


@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32 - 1))
def test_each_token_is_in_one_place_after_500_random_operations(seed):
    rng = np.random.default_rng(seed)
    state = new_state(640, 640)
    twins = [Twin() for _ in range(ROWS)]
    saved = None
    kinds = ["append"] * 40 + ["compact", "reset", "fill", "insert", "save", "save", "back", "back"]
    for _ in range(500):
        kind = rng.choice(kinds)
        if kind == "append":
            active = rng.random(ROWS) < 0.8
            actions = rng.integers(0, 3, (ROWS, 3)).astype(np.int8)
            state = step(state, active, actions)
            for row in np.flatnonzero(active):
                twins[row].append(actions[row].tolist())
        elif kind == "compact":
            mask = rng.random((ROWS, 600)) < 0.7
            state = jit_compact(state, mask)
            for row, twin in enumerate(twins):
                twin.drop(np.flatnonzero(~mask[row]).tolist())
        elif kind == "reset":
            row = int(rng.integers(ROWS))
            state = jit_reset(state, row)
            twins[row] = Twin()
        elif kind in ("fill", "insert"):
            row, n, padded = int(rng.integers(ROWS)), int(rng.integers(1, 40)), 40
            actions = rng.integers(0, 3, (padded, 3)).astype(np.int8)
            k = [jnp.asarray(kv_of(np.arange(padded), i, np.full(padded, row))) for i in LAYERS]
            if kind == "fill":
                state = jit_fill(state, row, k, [-x for x in k], actions, n)
            else:
                source = jit_fill(new_state(640, 640, rows=1), 0, k, [-x for x in k], actions, n)
                state = jit_insert(state, row, source)
            twins[row].fill(actions[:n].tolist())
        elif kind == "save":
            saved = (snapshot(state), [copy_of(t) for t in twins])
        elif saved is not None:
            # Rollback, most often across several window expiries: nothing that the ring destroyed meanwhile is lost.
            state = restore(saved[0])
            twins = [copy_of(t) for t in saved[1]]
        if rng.random() < 0.05:
            for row, twin in enumerate(twins):
                check_row(state, row, twin)
    for row, twin in enumerate(twins):
        check_row(state, row, twin)


def copy_of(twin: Twin) -> Twin:
    copy = Twin()
    copy.length = twin.length
    copy.ring = {p: list(a) for p, a in twin.ring.items()}
    copy.kept = [dict(k) for k in twin.kept]
    return copy


def test_rollback_across_a_window_expiry_restores_what_was_released():
    state, twin = new_state(), Twin()
    active = np.ones(ROWS, bool)
    for _ in range(WINDOW + 3):
        state = step(state, active, np.full((ROWS, 3), RELEASE, np.int8))
        twin.append([RELEASE] * 3)
    kept, before = snapshot(state), copy_of(twin)
    for _ in range(4):
        state = step(state, active, np.full((ROWS, 3), RELEASE, np.int8))
    assert 3 not in np.asarray(state.recent_position)
    state = restore(kept)
    for row in range(ROWS):
        check_row(state, row, before)
    state = step(state, active, np.full((ROWS, 3), LOW, np.int8))
    check_row(kept, 0, before)


def test_one_compilation_serves_all_values():
    state = new_state(64, 64)
    with jax.log_compiles(False):
        before = step._cache_size()
        for i in range(20):
            state = step(state, np.asarray([True, i % 2 == 0, False]), np.full((ROWS, 3), i % 3, np.int8))
    assert step._cache_size() - before <= 1


def test_append_updates_in_place():
    state = init_state(
        KVSpec(num_layers=3, num_kv_heads=2, head_dim=64),
        rows=4,
        window=16,
        sinks=2,
        high_slots=1024,
        low_slots=1024,
        dtype="float32",
    )
    k = [jnp.ones((4, 2, 64))] * 3

    def advance(state, k, active, actions):
        return set_pending(append(state, k, k, active), actions, active)

    compiled = jax.jit(advance, donate_argnums=0).lower(state, k, np.ones(4, bool), np.ones((4, 3), np.int8)).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 0.99 * allocated_bytes(state)
    assert memory.temp_size_in_bytes < 0.01 * allocated_bytes(state)


def test_full_partition_is_a_fault_of_its_row_alone():
    state = new_state(64, 64)
    for i in range(64 + WINDOW + 2):
        state = step(state, np.asarray([True, i < 30, True]), np.asarray([[2, 2, 1], [1] * 3, [0, 0, 0]], np.int8))
    faults = np.asarray(state.fault)
    assert faults[1] == faults[2] == 0
    assert "layer group 0" in describe_fault(int(faults[0]))
    assert "no free slot" in describe_fault(int(faults[0]))


def test_scale_beyond_fp16_is_a_fault_that_names_the_layer():
    state = new_state(64, 64)
    active = jnp.ones(ROWS, bool)
    k = [jnp.ones((ROWS, 2, 6))] * 3
    k[1] = k[1].at[2, 1, 0].set(1e6)
    for i in range(WINDOW + SINKS + 1):
        state = append(state, k, k, active)
        state = set_pending(state, jnp.full((ROWS, 3), LOW, jnp.int8), active)
        assert np.asarray(state.fault).any() == (i >= WINDOW + SINKS)
    faults = np.asarray(state.fault)
    assert faults[:2].tolist() == [0, 0]
    assert "layer 1:" in describe_fault(int(faults[2]))


def test_scale_fault_in_a_prompt():
    k = [jnp.ones((20, 2, 6))] * 3
    k[2] = k[2].at[8, 0, 3].set(1e6)
    for action, faulty in ((LOW, True), (HIGH, False), (RELEASE, False)):
        state = fill_row(new_state(64, 64), 1, k, k, jnp.full((20, 3), action, jnp.int8), 20)
        faults = np.asarray(state.fault)
        assert faults[0] == faults[2] == 0
        assert bool(faults[1]) == faulty
        if faulty:
            assert "layer 2:" in describe_fault(int(faults[1]))


def test_prompt_that_does_not_fit_is_a_fault():
    k = [jnp.ones((200, 2, 6))] * 3
    state = fill_row(new_state(64, 64), 0, k, k, jnp.full((200, 3), HIGH, jnp.int8), 200)
    assert "no free slot" in describe_fault(int(state.fault[0]))


def test_grow_keeps_everything_and_leaves_no_fault():
    state, twin = new_state(64, 64), Twin()
    for i in range(60):
        actions = [[2, 1, 0], [1, 1, 2], [0, 2, 1]]
        state = step(state, np.ones(ROWS, bool), np.asarray(actions, np.int8))
        twin.append(actions[0])
        if i == 40:
            state = grow(state, (128, 65, 10), (0, 0, 200))
            assert state.high_capacity == (128, 128, 64)
            assert state.low_capacity == (64, 64, 256)
    check_row(state, 0, twin)


def test_padded_sizes():
    sizes = sorted({pad_capacity(n) for n in range(1, 9000)})
    assert sizes[0] == 64
    assert pad_capacity(0) == 0
    assert all(s % 64 == 0 for s in sizes)
    for low, high in itertools.pairwise(sizes):
        assert pad_capacity(low) == low
        assert pad_capacity(low + 1) == high
        if low >= 512:
            assert high / low <= 1 + 1 / 8 + 1e-9
    assert sum(1024 < s <= 2048 for s in sizes) == 8


def test_impossible_states_are_refused():
    with pytest.raises(CapacityError, match="window of 0"):
        init_state(SPEC, rows=1, window=0, sinks=0, high_slots=1, low_slots=1, dtype="float32")
    with pytest.raises(CapacityError, match="0 rows"):
        init_state(SPEC, rows=0, window=1, sinks=0, high_slots=1, low_slots=1, dtype="float32")
    with pytest.raises(CapacityError, match="does not fit"):
        insert_row(new_state(64), 0, new_state(128, rows=1))
    with pytest.raises(CapacityError, match="window"):
        insert_row(new_state(64, 64), 0, dataclasses.replace(new_state(64, 64, rows=1), sinks=9))


def test_bfloat16_state_stores_two_bytes():
    both = [allocated_bytes(new_state(512, 0, dtype)) for dtype in ("bfloat16", "float32")]
    assert 1.8 < both[1] / both[0] <= 2


def test_low_partition_is_smaller_than_high():
    spec = KVSpec(num_layers=3, num_kv_heads=2, head_dim=64)
    make = functools.partial(init_state, spec, rows=1, window=1, sinks=0, dtype="bfloat16")
    high, low = make(high_slots=1024, low_slots=0), make(high_slots=0, low_slots=1024)
    assert allocated_bytes(low) < 0.30 * allocated_bytes(high)


def test_quantizing_on_expiry_equals_quantizing_at_once():
    state = new_state(64, 64)
    for _ in range(WINDOW + SINKS + 1):
        state = step(state, np.ones(ROWS, bool), np.full((ROWS, 3), LOW, np.int8))
    codes, scale = quantize(jnp.asarray(kv_of(np.full(ROWS, SINKS), 0, np.arange(ROWS))))
    np.testing.assert_array_equal(state.layers[0].low_k_scale[:, :, 0], scale)
    assert (np.asarray(state.layers[0].low_k_codes[:, :, 0]) != np.asarray(codes)).mean() < 0.02
