"""`deletion_effect` and `output_change` against brute force in float64, one slot at a time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import Attention, make_layer, numbered, relative_error, with_dtype

from jaxkv.errors import KernelError
from jaxkv.ops import blocks
from jaxkv.ops.deletion_effect import SMALLEST_REMAINDER, deletion_effect, output_change
from jaxkv.ops.layer_kv import DensePart, LayerKV, LowPart
from jaxkv.ops.partials import MASKED

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
# Cases that differ in content only share one compilation.
CASES = {
    "plain": {},
    "sinks": {"sinks": True},
    "outlier channel": {"outlier": True},
    "nearly empty": {"density": 0.1},
    "gqa 1, no low, odd width": {"group": 1, "low": 0, "dim": 33},
    "gqa 3, sliding window": {"group": 3, "window": 20},
    "gqa 4, no high, width 80": {"group": 4, "tokens": 1, "high": 0, "dim": 80},
    "gqa 8, ring only, more queries and slots than a tile": {
        "group": 8,
        "tokens": 5,
        "kv_heads": 1,
        "high": 0,
        "low": 0,
        "ring": 45,
        "size": 19,
    },
    "bfloat16": {"dtype": "bfloat16"},
}
compute = jax.jit(deletion_effect, static_argnames=("scale", "window", "implementation"))


def effect(q, q_position, lse, layer, pages, implementation, window=None):
    lse = jnp.asarray(lse, jnp.float32)
    scale = q.shape[-1] ** -0.5
    return compute(q, q_position, lse, layer, pages, scale=scale, window=window, implementation=implementation)


def make_case(rng, **case):
    """Queries, positions, layer and pages of shuffled slots, which come from every partition, with gaps."""
    case = {
        "group": 2,
        "kv_heads": 2,
        "tokens": 3,
        "dim": 64,
        "high": 20,
        "low": 18,
        "ring": 8,
        "rows": 2,
        "dtype": "float32",
        "density": 0.8,
        "outlier": False,
        "size": 6,
    } | case
    slots = case["high"] + case["low"] + case["ring"]
    names = ("rows", "kv_heads", "dim", "high", "low", "ring", "density", "outlier")
    layer = with_dtype(make_layer(rng, length=slots, **{name: case[name] for name in names}), case["dtype"])
    q = rng.standard_normal((case["rows"], case["tokens"], case["group"] * case["kv_heads"], case["dim"]))
    q_position = slots - 4 + np.arange(case["tokens"]) + np.zeros((case["rows"], 1), int)
    if case["tokens"] > 1:
        q_position[0, -1] = -1
    pages = -(-slots // case["size"]) + 1
    numbers = np.full((case["rows"], pages * case["size"]), -1)
    for row in numbers:
        row[rng.permutation(len(row))[:slots]] = rng.permutation(slots)
    return (
        jnp.asarray(q, case["dtype"]),
        jnp.asarray(q_position, jnp.int32),
        layer,
        jnp.asarray(numbers.reshape(case["rows"], pages, -1), jnp.int32),
    )


def brute_force(attention, layer, pages, dim):
    """s and u of every page, query and head, summed slot by slot."""
    _, v, _ = numbered(layer, dim)
    rows, heads, tokens, _ = attention.a.shape
    s = np.zeros((rows, pages.shape[1], heads, tokens))
    u = np.zeros((*s.shape, dim))
    for b, p, h, t in np.ndindex(s.shape):
        for slot in pages[b, p][pages[b, p] >= 0]:
            a = attention.a[b, h, t, slot]
            s[b, p, h, t] += a
            u[b, p, h, t] += a * v[b, h // (heads // v.shape[1]), slot]
    return s, u


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)  # one page at a time


@pytest.mark.parametrize("name", CASES)
def test_equals_brute_force(name):
    rng = np.random.default_rng(sum(map(ord, name)))
    case = dict(CASES[name])
    window, sinks = case.pop("window", None), case.pop("sinks", False)
    q, q_position, layer, pages = make_case(rng, **case)
    dim = q.shape[-1]
    sink_logits = rng.standard_normal(q.shape[2]) + 2 if sinks else None
    attention = Attention(q, q_position, layer, dim**-0.5, window, sink_logits)
    want = brute_force(attention, layer, np.asarray(pages), dim)
    for implementation in ("xla", "triton_interpret"):
        got = effect(q, q_position, attention.lse, layer, pages, implementation, window)
        for found, wanted in zip(got, want, strict=True):
            assert found.dtype == jnp.float32
            assert relative_error(found, wanted) < TOLERANCE[str(q.dtype)], implementation


@pytest.mark.parametrize("implementation", ["xla", "triton_interpret"])
def test_joint_deletion_is_the_sum_over_pages(implementation):
    """CommitKV Eq. 11: the change of a set of pages, recomputed with all their tokens hidden."""
    q, q_position, layer, pages = make_case(np.random.default_rng(5))
    whole = Attention(q, q_position, layer, 0.125)
    s, u = effect(q, q_position, whole.lse, layer, pages, implementation)
    out = jnp.asarray(whole.out, jnp.float32)
    for together in ([0], [1, 4], [0, 2, 3, 5]):
        deleted = np.asarray(pages)[:, together].reshape(len(pages), -1)
        left = Attention(q, q_position, layer, 0.125, deleted=deleted)
        s_joint, u_joint = (np.asarray(x)[:, together].sum(1, keepdims=True) for x in (s, u))
        change = output_change(out, jnp.asarray(s_joint), jnp.asarray(u_joint))
        assert relative_error(change[:, 0].swapaxes(1, 2), whole.out - left.out) < 1e-5


@pytest.mark.parametrize("implementation", ["xla", "triton_interpret"])
def test_a_page_that_holds_all_mass_reads_as_large(implementation):
    """With one valid token in all: its page changes every output to nothing, the others change nothing."""
    q, q_position, layer, pages = make_case(np.random.default_rng(6), density=0.0)
    low = dataclasses.replace(layer.low, position=layer.low.position.at[:, 3].set(7))
    layer = dataclasses.replace(layer, low=low)
    attention = Attention(q, q_position, layer, 0.125)
    s, u = effect(q, q_position, attention.lse, layer, pages, implementation)
    want, _ = brute_force(attention, layer, np.asarray(pages), q.shape[-1])
    assert set(np.unique(want)) == {0, 1}
    np.testing.assert_allclose(s, want, atol=1e-6)
    change = output_change(jnp.asarray(attention.out, jnp.float32), s, u)
    np.testing.assert_allclose(
        change, want[..., None] * attention.out.swapaxes(1, 2)[:, None], rtol=4e-7 / SMALLEST_REMAINDER, atol=1e-3
    )


@pytest.mark.parametrize("implementation", ["xla", "triton_interpret"])
def test_nothing_visible_gives_zeros(implementation):
    q, q_position, layer, pages = make_case(np.random.default_rng(7))
    # Padding, and queries whose log-sum-exp says that they saw nothing.
    q_position = jnp.asarray([[-1, 60, -1], [60, -1, 60]], jnp.int32)
    lse = jnp.where(q_position >= 0, MASKED, 1.0)[:, :, None] + jnp.zeros(q.shape[:3])
    s, u = effect(q, q_position, lse, layer, pages, implementation)
    for x in (s, u, output_change(jnp.zeros(q.shape), s, u)):
        assert (np.asarray(x) == 0).all()


def test_blocks_of_pages_change_nothing(monkeypatch):
    q, q_position, layer, pages = make_case(np.random.default_rng(8))
    lse = jnp.ones(q.shape[:3])
    found = []
    for pages_at_a_time in (4, 1000):  # of nine: the last block is padded
        monkeypatch.setattr(blocks, "BLOCK_BYTES", pages_at_a_time * 4 * 2 * 2 * 6 * (2 * 64 + 6))
        fresh = jax.jit(functools.partial(deletion_effect, scale=0.125, implementation="xla"))
        found.append(fresh(q, q_position, lse, layer, pages))
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_cache_is_never_dequantised_whole(monkeypatch):
    monkeypatch.undo()
    rows, heads, dim, slots, shape = 2, 4, 64, 32768, jax.ShapeDtypeStruct
    dense = DensePart(*[shape((rows, heads, slots, dim), jnp.bfloat16)] * 2, shape((rows, slots), jnp.int32))
    low = LowPart(
        *[shape((rows, heads, slots, dim // 2), jnp.uint8)] * 2,
        *[shape((rows, heads, slots), jnp.float16)] * 2,
        shape((rows, slots), jnp.int32),
    )
    recent = DensePart(*[shape((rows, heads, 16, dim), jnp.bfloat16)] * 2, shape((rows, 16), jnp.int32))
    compiled = compute.lower(
        shape((rows, 8, 2 * heads, dim), jnp.bfloat16),
        shape((rows, 8), jnp.int32),
        shape((rows, 8, 2 * heads), jnp.float32),
        LayerKV(dense, low, recent),
        shape((rows, 64, 16), jnp.int32),
        scale=0.125,
        implementation="xla",
    ).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < rows * heads * slots * dim * 4 / 4


def test_errors_name_the_remedy():
    q, q_position, layer, pages = make_case(np.random.default_rng(9))
    call = functools.partial(deletion_effect, lse=jnp.zeros(q.shape[:3]), layer=layer, page_slots=pages, scale=1.0)
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2"):
        call(q[:, :, :3], q_position, lse=jnp.zeros((2, 3, 3)))
    with pytest.raises(KernelError, match="needs an NVIDIA or AMD GPU"):
        call(q, q_position, implementation="triton")
