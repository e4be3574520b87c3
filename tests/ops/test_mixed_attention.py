"""`mixed_attention` against brute force in float64 over the same stored numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import make_layer

from jaxkv.errors import KernelError
from jaxkv.ops import blocks
from jaxkv.ops.layer_kv import DensePart, LayerKV, LowPart
from jaxkv.ops.mixed_attention import mixed_attention
from jaxkv.ops.quantize import dequantize

BLOCK = 64  # slots a block of the XLA implementation, in these tests
attend = jax.jit(mixed_attention, static_argnames=("scale", "window", "implementation", "return_lse"))


def brute_force(q, layer, q_position, new_kv, scale, window=None, sink_logits=None):
    """One query, one head at a time, over a plain list of visible (key, value) pairs, in float64."""
    q, q_position = np.asarray(q, np.float64), np.asarray(q_position)
    rows, tokens, heads, dim = q.shape
    kv_heads = layer.recent.k.shape[1]
    low = layer.low
    parts = [(layer.high.k, layer.high.v, layer.high.position), (layer.recent.k, layer.recent.v, layer.recent.position)]
    parts.append((dequantize(low.k_codes, low.k_scale, dim), dequantize(low.v_codes, low.v_scale, dim), low.position))
    parts.append((np.swapaxes(new_kv[0], 1, 2), np.swapaxes(new_kv[1], 1, 2), q_position))
    k = np.concatenate([np.asarray(p[0], np.float64) for p in parts], 2)
    v = np.concatenate([np.asarray(p[1], np.float64) for p in parts], 2)
    position = np.concatenate([np.asarray(p[2]) for p in parts], 1)
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b, t, h in np.ndindex(rows, tokens, heads):
        at = q_position[b, t]
        seen = (position[b] >= 0) & (position[b] <= at)
        if window is not None:
            seen &= position[b] > at - window
        if at < 0 or not seen.any():
            continue
        g = h // (heads // kv_heads)
        scores = k[b, g][seen] @ q[b, t, h] * scale
        sink = [] if sink_logits is None else [np.float64(sink_logits[h])]
        top = max([scores.max(), *sink])
        weights = np.exp(scores - top)
        total = weights.sum() + sum(np.exp(s - top) for s in sink)
        out[b, t, h] = weights @ v[b, g][seen] / total
        lse[b, t, h] = top + np.log(total)
    return out, lse


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)  # the smallest block: 64 slots


CASES = {
    "gqa 3": {"heads": 9, "kv_heads": 3},
    "one head": {"heads": 2, "kv_heads": 2},
    "gqa 4": {"heads": 8, "kv_heads": 2},
    "one kv head": {"heads": 6, "kv_heads": 1},
    "odd head width": {"dim": 7},
    "chunk": {"tokens": 5},
    "no high": {"high": 0},
    "no low": {"low": 0},
    "ring only": {"high": 0, "low": 0},
    "blocked": {"high": 2 * BLOCK + 64, "low": BLOCK + 64, "rows": 2},
    "blocked chunk": {"high": BLOCK + 64, "low": 2 * BLOCK, "tokens": 3, "rows": 1},
    "window": {"window": 9},
    "sinks": {"sinks": True},
    "window and sinks in a chunk": {"window": 4, "sinks": True, "tokens": 6},
    "nearly empty": {"density": 0.02},
    "outlier channel": {"outlier": True},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_brute_force(name):
    """sgl-project/sglang#5700: what the op computes is the dequantised reference, scales included."""
    case = {
        "heads": 4,
        "kv_heads": 2,
        "dim": 16,
        "high": 64,
        "low": 64,
        "ring": 16,
        "rows": 3,
        "tokens": 1,
        "window": None,
        "sinks": False,
        "density": 0.8,
        "outlier": False,
    } | CASES[name]
    rng = np.random.default_rng(sum(map(ord, name)))
    rows, tokens, heads, dim = case["rows"], case["tokens"], case["heads"], case["dim"]
    length = case["high"] + case["low"] + case["ring"]
    layer = make_layer(
        rng,
        rows,
        case["kv_heads"],
        dim,
        case["high"],
        case["low"],
        case["ring"],
        length,
        case["density"],
        case["outlier"],
    )
    q = rng.standard_normal((rows, tokens, heads, dim)).astype(np.float32)
    new_kv = tuple(
        jnp.asarray(rng.standard_normal((rows, tokens, case["kv_heads"], dim)), jnp.float32) for _ in range(2)
    )
    q_position = length + np.arange(tokens)[None] + np.zeros((rows, 1), int)
    q_position[0, -1] = -1 if tokens > 1 else q_position[0, -1]
    sink_logits = rng.standard_normal(heads).astype(np.float32) if case["sinks"] else None
    q_position = jnp.asarray(q_position, jnp.int32)
    options = {"scale": dim**-0.5, "window": case["window"]}
    out, lse = attend(
        jnp.asarray(q),
        layer,
        q_position,
        new_kv=new_kv,
        sink_logits=None if sink_logits is None else jnp.asarray(sink_logits),
        return_lse=True,
        **options,
    )
    want, want_lse = brute_force(q, layer, q_position, new_kv, sink_logits=sink_logits, **options)
    error = np.linalg.norm(out - want) / np.linalg.norm(want)
    assert error < 2e-6, error
    seen = np.isfinite(want_lse)
    np.testing.assert_allclose(np.asarray(lse)[seen], want_lse[seen], rtol=1e-5, atol=1e-5)
    if tokens > 1:
        assert (np.asarray(out)[0, -1] == 0).all(), "a padded query gives zeros"


def test_a_query_that_sees_nothing_gives_zeros():
    rng = np.random.default_rng(0)
    layer = make_layer(rng, 2, 2, 8, 64, 64, 16, 200, density=0.0)
    q, kv = jnp.ones((2, 1, 4, 8)), jnp.ones((2, 1, 2, 8))
    out, lse = attend(q, layer, jnp.full((2, 1), -1), new_kv=(kv, kv), scale=1.0, return_lse=True)
    assert (np.asarray(out) == 0).all()
    assert (np.asarray(lse) == np.finfo(np.float32).min).all()


def test_rows_are_independent():
    rng = np.random.default_rng(1)
    layer = make_layer(rng, 3, 2, 16, BLOCK + 64, 64, 16, 2000)
    q = jnp.asarray(rng.standard_normal((3, 1, 4, 16)), jnp.float32)
    kv = jnp.asarray(rng.standard_normal((3, 1, 2, 16)), jnp.float32)
    together = attend(q, layer, jnp.full((3, 1), 2000), new_kv=(kv, kv), scale=0.25)
    alone = attend(
        q[1:2], jax.tree.map(lambda x: x[1:2], layer), jnp.full((1, 1), 2000), new_kv=(kv[1:2], kv[1:2]), scale=0.25
    )
    np.testing.assert_allclose(together[1:2], alone, rtol=1e-6, atol=1e-6)


def test_bfloat16_in_bfloat16_out():
    rng = np.random.default_rng(2)
    layer = make_layer(rng, 1, 2, 64, 64, 64, 16, 144)
    half = dataclasses.replace(
        layer,
        high=dataclasses.replace(layer.high, k=layer.high.k.astype("bfloat16"), v=layer.high.v.astype("bfloat16")),
        recent=dataclasses.replace(
            layer.recent, k=layer.recent.k.astype("bfloat16"), v=layer.recent.v.astype("bfloat16")
        ),
    )
    q = jnp.asarray(rng.standard_normal((1, 1, 4, 64)), jnp.bfloat16)
    kv = jnp.asarray(rng.standard_normal((1, 1, 2, 64)), jnp.bfloat16)
    out = attend(q, half, jnp.full((1, 1), 144), new_kv=(kv, kv), scale=0.125)
    assert out.dtype == jnp.bfloat16
    want, _ = brute_force(q, half, np.full((1, 1), 144), (kv, kv), 0.125)
    assert np.linalg.norm(np.asarray(out, np.float64) - want) / np.linalg.norm(want) < 1e-2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cache_is_never_dequantised_or_copied_whole(dtype):
    rows, heads, dim, slots = 4, 4, 64, 8192
    shape = jax.ShapeDtypeStruct
    part = DensePart(*[shape((rows, heads, slots, dim), dtype)] * 2, shape((rows, slots), jnp.int32))
    low = LowPart(
        *[shape((rows, heads, slots, dim // 2), jnp.uint8)] * 2,
        *[shape((rows, heads, slots), jnp.float16)] * 2,
        shape((rows, slots), jnp.int32),
    )
    recent = DensePart(*[shape((rows, heads, 16, dim), dtype)] * 2, shape((rows, 16), jnp.int32))
    kv = shape((rows, 1, heads, dim), dtype)
    compiled = attend.lower(
        shape((rows, 1, 4 * heads, dim), dtype),
        LayerKV(part, low, recent),
        shape((rows, 1), jnp.int32),
        new_kv=(kv, kv),
        scale=0.125,
    ).compile()
    dequantised = rows * heads * slots * dim * 4
    assert compiled.memory_analysis().temp_size_in_bytes < dequantised / 4


def test_a_forced_implementation_that_is_not_there_raises():
    """vllm-project/vllm#14221, ggml-org/llama.cpp#28633: what runs is what was asked for, or an error."""
    rng = np.random.default_rng(3)
    layer = make_layer(rng, 1, 2, 8, 64, 0, 4, 68)
    q, kv = jnp.ones((1, 1, 4, 8)), jnp.ones((1, 1, 2, 8))
    for name, reason in (("cuda", "no implementation 'cuda'"), ("triton", "head width 8")):
        with pytest.raises(KernelError, match=reason):
            mixed_attention(q, layer, jnp.full((1, 1), 68), new_kv=(kv, kv), scale=1.0, implementation=name)
    with pytest.raises(ValueError, match="not a multiple"):
        mixed_attention(jnp.ones((1, 1, 3, 8)), layer, jnp.full((1, 1), 68), new_kv=(kv, kv), scale=1.0)
