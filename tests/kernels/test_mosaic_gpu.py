"""The Mosaic GPU kernel of `mixed_attention`: its numbers and synchronisation, interpreted, and that it lowers."""

import functools
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import jaxkv
from jaxkv.errors import KernelError
from jaxkv.evaluation.kernel_cases import PLAIN, Content, Size, Source, random_layer
from jaxkv.evaluation.kernel_references import dequantized
from jaxkv.ops.mixed_attention import mixed_attention
from jaxkv.ops.partials import MASKED
from jaxkv.ops.quantize import quantize
from jaxkv.pallas import mosaic_gpu
from jaxkv.pallas.configs import Config
from jaxkv.pallas.mixed_attention_mosaic import mixed_attention_mosaic_gpu

available = pytest.mark.skipif(mosaic_gpu.plgpu is None, reason="this JAX has no Pallas Mosaic GPU")
interpreted = pytest.mark.skipif(
    not hasattr(mosaic_gpu.plgpu, "InterpretGPUParams"), reason=f"JAX {jax.__version__} cannot interpret Mosaic GPU"
)
SMALL = Size(rows=1, high=64, low=128, recent=16)
TOLERANCE = {"bfloat16": 5e-3, "float16": 1e-3}
CASES = {
    "one head": {"kv_heads": 2},
    "gqa 3": {"group": 3, "head_dim": 32},
    "gqa 4": {"group": 4, "head_dim": 128},
    "gqa 9": {"group": 9, "head_dim": 96},
    "float16": {"group": 2, "dtype": "float16"},
    "no high": {"size": Size(1, 0, 128, 16)},
    "no low": {"size": Size(1, 128, 0, 16)},
    "ring only": {"size": Size(2, 0, 0, 16)},
    "broken blocks": {"size": Size(1, 70, 130, 7)},
    "window and sinks": {"group": 2, "content": Content(window=60, sinks=True)},
    "nearly empty": {"content": Content(occupied=0.02)},
    "split, three stages": {"size": Size(1, 256, 320, 16), "config": Config(64, 4, 3, programs=8)},
    "one stage": {"config": Config(64, 4, 1)},
}


def make(kv_heads=1, group=1, head_dim=64, dtype="bfloat16", size=SMALL, content=PLAIN, rng=None):
    """Operands of a decoding step, in the order of the implementations' arguments."""
    source = Source(rng)
    layer = random_layer(source, size, kv_heads, head_dim, dtype, "all", content)
    q = source.normal(size.rows, 1, kv_heads * group, head_dim).astype(dtype)
    new = tuple(source.normal(size.rows, 1, kv_heads, head_dim).astype(dtype) for _ in range(2))
    position = jnp.full((size.rows, 1), size.high + size.low + size.recent, jnp.int32)
    return q, layer, position, new, source.normal(kv_heads * group) if content.sinks else None


def brute_force(q, layer, q_position, new_kv, sink_logits, *, scale, window):
    """One row, one head at a time, over the visible keys and values, in float64."""
    k, v, position = (np.asarray(x, np.float64) for x in dequantized(layer, q.shape[-1]))
    k, v = (
        np.concatenate([x, np.asarray(new, np.float64).swapaxes(1, 2)], 2)
        for x, new in zip((k, v), new_kv, strict=True)
    )
    position = np.concatenate([position, q_position], 1)
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], MASKED)
    for row, head in np.ndindex(q.shape[0], q.shape[2]):
        at = float(q_position[row, 0])
        seen = (position[row] >= 0) & (position[row] <= at)
        if window is not None:
            seen &= position[row] > at - window
        kv_head = head // (q.shape[2] // k.shape[1])
        scores = k[row, kv_head][seen] @ np.asarray(q[row, 0, head], np.float64) * scale
        sink = [] if sink_logits is None else [float(sink_logits[head])]
        if scores.size + len(sink):
            top = max([*scores, *sink])
            weights, total = np.exp(scores - top), np.exp(np.asarray([*scores, *sink]) - top).sum()
            out[row, 0, head], lse[row, 0, head] = weights @ v[row, kv_head][seen] / total, top + np.log(total)
    return out, lse


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_brute_force(name):
    """Interpreting also fails on reads out of bounds and on races for shared memory."""
    case = {**CASES[name]}
    config = case.pop("config", None)
    operands = make(**case, rng=np.random.default_rng(sum(map(ord, name))))
    q = operands[0]
    options = {"scale": q.shape[-1] ** -0.5, "window": case.get("content", PLAIN).window}
    kernel = functools.partial(mixed_attention_mosaic_gpu, interpret=True, config=config, **options)
    out, lse = jax.jit(kernel)(*operands)
    want, want_lse = brute_force(*operands, **options)
    assert out.dtype == q.dtype
    error = np.linalg.norm(np.asarray(out, np.float64) - want) / np.linalg.norm(want)
    assert error < TOLERANCE[str(q.dtype)], error
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)


@interpreted
def test_query_that_sees_nothing_gives_zeros():
    q, layer, position, new, _ = make(rng=np.random.default_rng(0))
    out, lse = call("mosaic_gpu_interpret", q, layer, jnp.full_like(position, -1), new, None)
    assert (np.asarray(out, np.float32) == 0).all()
    assert (np.asarray(lse) == MASKED).all()


def call(implementation, q, layer, position, new, sinks):
    return mixed_attention(
        q,
        layer,
        position,
        new_kv=new,
        sink_logits=sinks,
        scale=0.125,
        implementation=implementation,
        return_lse=True,
    )


def lower(implementation, device_kind="NVIDIA H100 80GB HBM3", **case):
    """The text of a decoding step, lowered for a GPU that need not be there."""
    device = AbstractDevice(device_kind=device_kind, num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(lambda *x: call(implementation, *x)).trace(*jax.eval_shape(functools.partial(make, **case)))
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@available
@pytest.mark.parametrize(("head_dim", "dtype"), [*((d, "bfloat16") for d in (32, 64, 96, 128)), (128, "float16")])
def test_kernel_lowers_for_hopper(head_dim, dtype):
    text = lower("mosaic_gpu", group=4, head_dim=head_dim, dtype=dtype, size=Size(2, 2048, 4096, 16))
    assert "custom_call @mosaic_gpu" in text
    assert "triton" not in text


@available
def test_kernel_is_never_chosen():
    assert "mosaic_gpu" not in lower(None)


@available
def test_obstacles_are_named():
    with pytest.raises(KernelError, match="wgmma is Hopper's \\(sm_90\\) and this is sm_80"):
        lower("mosaic_gpu", device_kind="NVIDIA A100")
    with pytest.raises(KernelError, match="head width 80 is no multiple of 32 up to 128"):
        lower("mosaic_gpu", head_dim=80)
    with pytest.raises(KernelError, match="65 queries share a KV head, 64 fit"):
        lower("mosaic_gpu", group=65)
    with pytest.raises(KernelError, match="queries and cache are float32; both must be bfloat16 or both float16"):
        lower("mosaic_gpu", dtype="float32")
    with pytest.raises(KernelError, match="'mosaic_gpu' needs an NVIDIA Hopper GPU and this is cpu"):
        call("mosaic_gpu", *make())
    q, layer, position, new, sinks = make()
    chunk = [jnp.repeat(x, 3, axis=1) for x in (q, position, *new)]
    with pytest.raises(KernelError, match="it decodes single tokens and was given 3"):
        call("mosaic_gpu_interpret", chunk[0], layer, chunk[1], (chunk[2], chunk[3]), sinks)


@pytest.mark.skipif(hasattr(mosaic_gpu.plgpu, "InterpretGPUParams"), reason="this JAX can interpret Mosaic GPU")
def test_jax_without_interpreter_is_named():
    with pytest.raises(KernelError, match=f"'mosaic_gpu_interpret' cannot run: .*JAX {jax.__version__}"):
        call("mosaic_gpu_interpret", *make())


def test_op_without_the_kernel_does_not_offer_it():
    assert "implementation" in inspect.signature(quantize).parameters
    with pytest.raises(KernelError, match="no implementation 'mosaic_gpu'; choose one of xla, triton, triton_interp"):
        quantize(jnp.ones((1, 1, 1, 64)), implementation="mosaic_gpu")


def test_one_module_imports_mosaic_gpu():
    """JAX calls the backend's API unstable: what changes in it must be met in one place."""
    package = Path(jaxkv.__file__).parent
    pattern = re.compile(r"^\s*(from|import) jax\.\S*(pallas import mosaic_gpu|mosaic)", re.M)
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if pattern.search(path.read_text())}
    assert found == {"pallas/mosaic_gpu.py"}
