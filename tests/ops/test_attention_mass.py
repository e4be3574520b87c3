"""`attention_mass` against brute force in float64, one query and one slot at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import Attention, make_layer, relative_error, with_dtype

from jaxkv.errors import KernelError
from jaxkv.ops import blocks
from jaxkv.ops.attention_mass import attention_mass
from jaxkv.ops.layer_kv import DensePart, LayerKV, LowPart
from jaxkv.ops.partials import MASKED

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
# Cases that differ in content only share one compilation. Blocks are 64 slots in these tests; in XLA the last block of
# 71 or 150 slots repeats some, and in the kernel one crosses from `low` into the ring.
CASES = {
    "plain": {},
    "sinks": {"sinks": True},
    "outlier channel": {"outlier": True},
    "nearly empty": {"density": 0.02},
    "gqa 1, no low, odd width": {"group": 1, "low": 0, "dim": 33},
    "gqa 3, sliding window": {"group": 3, "window": 50},
    "gqa 4, no high, width 80": {"group": 4, "tokens": 1, "high": 0, "dim": 80},
    "gqa 8, ring only, more queries than a tile": {
        "group": 8,
        "tokens": 5,
        "kv_heads": 1,
        "high": 0,
        "low": 0,
    },
    "long high": {"high": 150, "low": 0, "rows": 1, "kv_heads": 1, "tokens": 2},
    "bfloat16": {"dtype": "bfloat16", "high": 10},
}
compute = jax.jit(attention_mass, static_argnames=("scale", "window", "implementation"))


def make_case(rng, **case):
    """Queries, positions and layer."""
    case = {
        "group": 2,
        "kv_heads": 2,
        "tokens": 3,
        "dim": 64,
        "high": 20,
        "low": 71,
        "ring": 8,
        "rows": 2,
        "dtype": "float32",
        "density": 0.8,
        "outlier": False,
    } | case
    slots = case["high"] + case["low"] + case["ring"]
    names = ("rows", "kv_heads", "dim", "high", "low", "ring", "density", "outlier")
    layer = with_dtype(make_layer(rng, length=slots, **{name: case[name] for name in names}), case["dtype"])
    q = rng.standard_normal((case["rows"], case["tokens"], case["group"] * case["kv_heads"], case["dim"]))
    q_position = slots - 4 + np.arange(case["tokens"]) + np.zeros((case["rows"], 1), int)
    if case["tokens"] > 1:
        q_position[0, -1] = -1
    return jnp.asarray(q, case["dtype"]), jnp.asarray(q_position, jnp.int32), layer


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)  # the smallest block: 64 slots


@pytest.mark.parametrize("name", CASES)
def test_equals_brute_force(name):
    rng = np.random.default_rng(sum(map(ord, name)))
    case = dict(CASES[name])
    window, sinks = case.pop("window", None), case.pop("sinks", False)
    q, q_position, layer = make_case(rng, **case)
    heads, dim = q.shape[2:]
    sink_logits = rng.standard_normal(heads) + 2 if sinks else None
    attention = Attention(q, q_position, layer, dim**-0.5, window, sink_logits)
    rows, _, tokens, slots = attention.a.shape
    kv_heads = layer.recent.k.shape[1]
    want = np.zeros((rows, kv_heads, slots))
    for b, h, t in np.ndindex(rows, heads, tokens):
        want[b, h // (heads // kv_heads)] += attention.a[b, h, t]
    lse = jnp.asarray(attention.lse, jnp.float32)
    position = np.concatenate([part.position for part in (layer.high, layer.low, layer.recent)], 1)
    for implementation in ("xla", "triton_interpret"):
        got = compute(q, q_position, lse, layer, scale=dim**-0.5, window=window, implementation=implementation)
        assert got.dtype == jnp.float32
        assert relative_error(got, want) < TOLERANCE[str(q.dtype)], implementation
        assert (np.asarray(got)[np.broadcast_to((position < 0)[:, None], want.shape)] == 0).all()
        if not sinks:
            seen = (attention.lse.reshape(rows, tokens, kv_heads, -1) > MASKED).sum((1, 3))
            np.testing.assert_allclose(np.asarray(got).sum(2), seen, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "triton_interpret"])
def test_nothing_visible_gives_zeros(implementation):
    q, q_position, layer = make_case(np.random.default_rng(7))
    # Padding, and queries whose log-sum-exp says that they saw nothing.
    q_position = jnp.asarray([[-1, 100, -1], [100, -1, 100]], jnp.int32)
    lse = jnp.where(q_position >= 0, MASKED, 1.0)[:, :, None] + jnp.zeros(q.shape[:3])
    assert (
        np.asarray(compute(q, q_position, lse, layer, scale=0.125, window=None, implementation=implementation)) == 0
    ).all()


def test_the_cache_is_never_dequantised_or_converted_whole(monkeypatch):
    monkeypatch.undo()
    rows, heads, dim, slots, shape = 2, 4, 64, 16384, jax.ShapeDtypeStruct
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
        scale=0.125,
        implementation="xla",
    ).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < rows * heads * slots * dim * 4 / 2


def test_errors_name_the_remedy():
    q, q_position, layer = make_case(np.random.default_rng(9))
    call = functools.partial(attention_mass, lse=jnp.zeros(q.shape[:3]), layer=layer, scale=1.0)
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2"):
        call(q[:, :, :3], q_position, lse=jnp.zeros((2, 3, 3)))
    with pytest.raises(KernelError, match="needs an NVIDIA or AMD GPU"):
        call(q, q_position, implementation="triton")
