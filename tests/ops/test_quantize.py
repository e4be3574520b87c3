"""INT4 vectors against the paper's rule (PASK B.5), written again in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.errors import KernelError
from jaxkv.ops.int4 import pack, packed_width, unpack
from jaxkv.ops.quantize import SMALLEST_SCALE, dequantize, quantize


def reference(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scale of one vector, in float64 except where the rule says FP16."""
    largest = np.abs(x).max()
    if largest == 0:
        return np.zeros(len(x), int), np.float16(1)
    scale = np.float16(np.float32(max(np.float32(largest) / np.float32(7), SMALLEST_SCALE)))
    return np.clip(np.rint(x.astype(np.float32) / np.float32(scale)), -7, 7).astype(int), scale


@pytest.mark.parametrize("head_dim", [1, 2, 7, 64, 80])
@pytest.mark.parametrize("magnitude", [1e-9, 1e-7, 3e-5, 1.0, 300.0, 1e5])
def test_codes_scales_and_error(head_dim, magnitude):
    rng = np.random.default_rng(head_dim)
    x = (rng.standard_normal((5, 3, head_dim)) * magnitude).astype(np.float32)
    x[0, 0] = 0
    packed, scale = jax.jit(quantize)(x)
    assert packed.shape == (5, 3, packed_width(head_dim))
    assert packed.dtype == jnp.uint8
    back = np.asarray(dequantize(packed, scale, head_dim))
    codes = np.concatenate([np.asarray(h) for h in unpack(packed)], -1)
    assert (codes[..., head_dim:] == 0).all()
    codes = codes[..., :head_dim]
    assert np.abs(codes).max() <= 7
    assert scale[0, 0] == 1
    assert (codes[0, 0] == 0).all()
    for i in np.ndindex(5, 3):
        want_codes, want_scale = reference(x[i])
        assert np.asarray(scale)[i] == want_scale
        np.testing.assert_array_equal(codes[i], want_codes)
    largest = np.abs(x).max(-1)
    scale = np.asarray(scale, np.float32)
    normal = scale >= 2.0**-14
    error = np.abs(back - x).max(-1)
    assert (error <= np.where(normal, 0.51 * scale, largest)).all()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-4e5, 4e5, width=32), min_size=8, max_size=8))
def test_round_trip_error_is_bounded_for_any_vector(values):
    x = np.asarray(values, np.float32)
    packed, scale = quantize(jnp.asarray(x))
    error = np.abs(np.asarray(dequantize(packed, scale, 8)) - x).max()
    scale = float(scale)
    assert error <= (0.51 * scale if scale >= 2.0**-14 else np.abs(x).max())


def test_every_code_pair_survives_packing():
    codes = jnp.asarray([(a, b) for a in range(-7, 8) for b in range(-7, 8)], jnp.int8)
    low, high = unpack(pack(codes))
    np.testing.assert_array_equal(low[:, 0], codes[:, 0])
    np.testing.assert_array_equal(high[:, 0], codes[:, 1])


def test_dimensions_d_and_d_plus_half_share_a_byte():
    codes = jnp.asarray([[1, 2, 3, -1, -2, -3]], jnp.int8)
    assert np.asarray(pack(codes)).tolist() == [[0xF1, 0xE2, 0xD3]]


def test_a_scale_beyond_fp16_is_visible():
    _, scale = quantize(jnp.full((1, 4), 7 * 65536.0))
    assert np.isinf(np.asarray(scale))[0]


def awkward_vectors(head_dim: int) -> np.ndarray:
    """Every magnitude from subnormal to the largest, zeros, one value alone, and quotients that are exact ties."""
    rng = np.random.default_rng(head_dim)
    magnitude = 10.0 ** rng.uniform(-44, 38, (150, 1))
    x = rng.standard_normal((150, head_dim)) * magnitude
    x[0] = 0
    x[1, 1:] = 0
    x[2] = np.arange(head_dim) % 15 - 7
    x[3] = x[2] / 2
    x[3, 0] = 7
    x[4] = x[3] * 2.0**-20
    x[5] = 2.0**-24 * (np.arange(head_dim) % 15 - 7) / 2  # the smallest scale
    x[6] = 1e-44
    x[7] = 65504 * 7
    x[8] = 3e38
    return np.clip(x, -3e38, 3e38).astype(np.float32).reshape(3, 50, head_dim)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [1, 7, 64, 80, 255])
def test_the_kernel_equals_xla_bit_for_bit(head_dim, dtype):
    x = jnp.asarray(awkward_vectors(head_dim), dtype)
    xla, kernel = [jax.jit(functools.partial(quantize, implementation=name))(x) for name in ("xla", "triton_interpret")]
    for want, got in zip(xla, kernel, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))
    assert np.isinf(np.asarray(kernel[1])).any()


def test_an_empty_partition_has_no_vectors():
    codes, scale = quantize(jnp.zeros((2, 3, 0, 64)), implementation="triton_interpret")
    assert (codes.shape, scale.shape) == ((2, 3, 0, 32), (2, 3, 0))


def test_a_forced_kernel_that_cannot_run_raises():
    for x, reason in (
        (jnp.ones((2, 300)), "head width 300 is outside 1 to 256"),
        (jnp.ones((2, 64)), "needs an NVIDIA"),
    ):
        with pytest.raises(KernelError, match=reason):
            quantize(x, implementation="triton")
