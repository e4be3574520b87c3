"""Speed of attention over the compressed cache: against the bandwidth of a copy, and against dense attention.

Every figure is a ratio of times measured in one run. A time is that of several layers, each with a cache of its own, so
that neither a launch nor a warm cache decides it.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.evaluation.figures import Figure
from jaxkv.ops.attention_mass import attention_mass
from jaxkv.ops.deletion_effect import deletion_effect
from jaxkv.ops.int4 import packed_width
from jaxkv.ops.layer_kv import DensePart, LayerKV, LowPart
from jaxkv.ops.mixed_attention import mixed_attention
from jaxkv.ops.quantize import quantize

# Payload ratio -> shares of the tokens at full precision and in INT4; the rest is released.
SHARES: Final = {"1.0": (1.0, 0.0), "0.5": (0.37, 0.5), "0.33": (0.2, 0.5)}
WINDOW: Final = 16
ROUNDS: Final = 7
QUERIES, PAGES, PAGE_SLOTS = 8, 64, 16  # what a commit of CommitKV measures


@dataclasses.dataclass(frozen=True)
class Heads:
    """A model's attention layout."""

    heads: int
    kv_heads: int
    head_dim: int


LAYOUTS: Final = {
    "qwen3-4b": Heads(32, 8, 128),
    "qwen3-14b": Heads(40, 8, 128),
    "gpt-oss-20b": Heads(64, 8, 64),
    "qwen3.6-27b": Heads(24, 4, 256),
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """One measurement of `mixed_attention`: rows that have each seen `tokens` tokens, at a payload ratio."""

    layout: str
    tokens: int
    rows: int
    ratio: str

    @property
    def name(self) -> str:
        return f"{self.layout}.t{self.tokens}.b{self.rows}.r{self.ratio}"


def gpu_shapes() -> tuple[Shape, ...]:
    """What matters most first: a run that is stopped early has it."""
    order = [("qwen3-4b", 32_768, 8), ("qwen3-4b", 8192, 8)]
    order += [(layout, tokens, rows) for layout in LAYOUTS for tokens in (32_768, 8192) for rows in (8, 1, 32)]
    return tuple(Shape(*one, ratio) for one in dict.fromkeys(order) for ratio in reversed(SHARES))


CPU_SHAPES: Final = tuple(Shape("qwen3-4b", 8192, 4, ratio) for ratio in SHARES) + tuple(
    Shape("gpt-oss-20b", 2048, rows, "0.33") for rows in (1, 8)
)


def benchmark(shapes: Sequence[Shape], *, layers: int, seconds: float, dtype: str) -> Iterator[dict[str, Figure]]:
    """Measure `mixed_attention` at each shape, then the other ops at the first one; a dictionary at a time.

    Figures, `<op>.<shape>.<figure>`: bytes that must move (each once), us (a layer), bandwidth_fraction (of the
    measured copy bandwidth, `copy_gb_per_s`) and, for mixed_attention, dense_us and dense_ratio:
    `jax.nn.dot_product_attention` over all tokens, its time over ours. Shapes that do not fit into memory or time are
    left out.

    Args:
      layers: caches that a measurement goes through.
      seconds: no measurement starts after so many.
      dtype: of queries and of the full-precision partitions.
    """
    began = time.perf_counter()
    bandwidth = copy_bandwidth()
    yield {"copy_gb_per_s": bandwidth / 1e9}
    dense: dict[tuple[str, int, int], float | None] = {}
    for shape in shapes:
        if time.perf_counter() - began > seconds:
            return
        heads = LAYOUTS[shape.layout]
        moved = attention_bytes(shape, dtype)
        if not fits(moved * layers):
            continue
        key = (shape.layout, shape.tokens, shape.rows)
        if key not in dense:
            dense[key] = dense_seconds(heads, shape, layers, dtype)
        took = mixed_seconds(heads, shape, layers, dtype)
        figures: dict[str, Figure] = {
            "bytes": moved,
            "us": took * 1e6,
            "bandwidth_fraction": moved / took / bandwidth,
        }
        if (reference := dense[key]) is not None:
            figures |= {"dense_us": reference * 1e6, "dense_ratio": reference / took}
        yield {f"mixed_attention.{shape.name}.{name}": value for name, value in figures.items()}
    if shapes and time.perf_counter() - began < seconds:
        yield from _other_ops(shapes[0], layers, dtype, bandwidth)


def _other_ops(shape: Shape, layers: int, dtype: str, bandwidth: float) -> Iterator[dict[str, Figure]]:
    heads = LAYOUTS[shape.layout]
    q, caches, position, lse, pages = probe_operands(heads, dataclasses.replace(shape, ratio="0.33"), layers, dtype)
    itemsize = jnp.dtype(dtype).itemsize
    x = vectors_of(heads, shape, layers, dtype)
    vectors = x.shape[1]
    scale = heads.head_dim**-0.5
    page_bytes = 2 * shape.rows * heads.kv_heads * PAGES * PAGE_SLOTS * heads.head_dim * itemsize
    out_bytes = 4 * shape.rows * PAGES * heads.heads * q.shape[1] * (heads.head_dim + 1)
    cache_bytes = attention_bytes(dataclasses.replace(shape, ratio="0.33"), dtype) // 2  # keys only
    runs: dict[str, tuple[int, Callable[..., Any], tuple[Any, ...]]] = {
        "deletion_effect": (
            page_bytes + out_bytes,
            lambda c: [deletion_effect(q, position, lse, layer, pages, scale=scale) for layer in c],
            (caches,),
        ),
        "attention_mass": (
            cache_bytes,
            lambda c: [attention_mass(q, position, lse, layer, scale=scale) for layer in c],
            (caches,),
        ),
        "quantize": (
            vectors * (heads.head_dim * itemsize + packed_width(heads.head_dim) + 2),
            lambda y: [quantize(one) for one in y],
            (x,),
        ),
    }
    for op, (moved, call, operands) in runs.items():
        took = seconds_of(call, *operands) / layers
        yield {
            f"{op}.{shape.layout}.t{shape.tokens}.b{shape.rows}.{name}": value
            for name, value in (
                ("bytes", moved),
                ("us", took * 1e6),
                ("bandwidth_fraction", moved / took / bandwidth),
            )
        }


def attention_bytes(shape: Shape, dtype: str) -> int:
    """Bytes that one decode call over a full cache must read or write once: keys, values, scales, positions, q, out."""
    heads, itemsize = LAYOUTS[shape.layout], jnp.dtype(dtype).itemsize
    high, low = (round(share * shape.tokens) for share in SHARES[shape.ratio])
    vector, packed = heads.head_dim * itemsize, packed_width(heads.head_dim) + 2
    cache = heads.kv_heads * 2 * ((high + WINDOW + 1) * vector + low * packed) + 4 * (high + low + WINDOW)
    return shape.rows * (cache + 2 * heads.heads * vector)


def fits(size: int) -> bool:
    """Whether `size` bytes of caches, and the dense cache beside them, are well within the device's memory."""
    stats = jax.devices()[0].memory_stats()
    return stats is None or "bytes_limit" not in stats or 5 * size < stats["bytes_limit"]


def operands_of(heads: Heads, shape: Shape, layers: int, dtype: str, queries: int = 1) -> tuple[Any, ...]:
    """Random queries, caches in full use, positions and new keys and values, made on the device."""
    high, low = (round(share * shape.tokens) for share in SHARES[shape.ratio])
    b, k, d = shape.rows, heads.kv_heads, heads.head_dim

    @jax.jit
    def make(key: Array) -> tuple[Any, ...]:
        kq, kn, *keys = jax.random.split(key, 2 + layers)

        def cache(key: Array) -> LayerKV:
            parts = iter(jax.random.split(key, 6))

            def values(slots: int) -> Array:
                return jax.random.normal(next(parts), (b, k, slots, d), jnp.dtype(dtype))

            def codes() -> Array:
                return jax.random.bits(next(parts), (b, k, low, packed_width(d)), jnp.uint8)

            def positions(start: int, slots: int) -> Array:
                return jnp.broadcast_to(jnp.arange(start, start + slots, dtype=jnp.int32), (b, slots))

            scales = jnp.full((b, k, low), 0.2, jnp.float16)
            return LayerKV(
                DensePart(values(high), values(high), positions(0, high)),
                LowPart(codes(), codes(), scales, scales, positions(high, low)),
                DensePart(values(WINDOW), values(WINDOW), positions(high + low, WINDOW)),
            )

        q = jax.random.normal(kq, (b, queries, heads.heads, d), jnp.dtype(dtype))
        new = jax.random.normal(kn, (2, b, queries, k, d), jnp.dtype(dtype))
        position = jnp.broadcast_to(high + low + WINDOW + jnp.arange(queries, dtype=jnp.int32), (b, queries))
        return q, tuple(map(cache, keys)), position, (new[0], new[1])

    return make(jax.random.key(0))


def probe_operands(heads: Heads, shape: Shape, layers: int, dtype: str) -> tuple[Any, ...]:
    """Queries, caches, positions, log-sum-exps and pages of random slots, for the ops over numbered slots."""
    q, caches, position, _ = operands_of(heads, shape, layers, dtype, queries=QUERIES)
    slots = sum(part.position.shape[1] for part in (caches[0].high, caches[0].low, caches[0].recent))
    pages = jax.random.randint(jax.random.key(0), (shape.rows, PAGES, PAGE_SLOTS), 0, slots, jnp.int32)
    return q, caches, position, jnp.full(q.shape[:3], 10.0), pages


def vectors_of(heads: Heads, shape: Shape, layers: int, dtype: str) -> Float[Array, "L N D"]:
    """Random vectors to quantise: the keys of all tokens, a layer at a time."""
    vectors = shape.rows * heads.kv_heads * shape.tokens
    return jax.random.normal(jax.random.key(1), (layers, vectors, heads.head_dim), jnp.float32).astype(dtype)


def mixed_seconds(heads: Heads, shape: Shape, layers: int, dtype: str, implementation: str | None = None) -> float:
    """Seconds of one layer's `mixed_attention` for one new token a row."""
    q, caches, position, new = operands_of(heads, shape, layers, dtype)
    attend = functools.partial(mixed_attention, scale=heads.head_dim**-0.5, implementation=implementation)

    def step(q: Array, caches: Sequence[LayerKV], position: Array, new: Any) -> Array:
        for cache in caches:  # each layer waits for the one before, as in a model
            q = attend(q, cache, position, new_kv=new)
        return q

    return seconds_of(step, q, caches, position, new) / layers


def dense_seconds(heads: Heads, shape: Shape, layers: int, dtype: str) -> float | None:
    """Seconds of one layer's `jax.nn.dot_product_attention` over all tokens, by its fastest implementation here.

    None where the dense caches do not fit into memory.
    """
    b, k, d = shape.rows, heads.kv_heads, heads.head_dim
    if not fits(2 * b * k * shape.tokens * d * jnp.dtype(dtype).itemsize * layers):
        return None

    @jax.jit
    def make(key: Array) -> tuple[Array, list[Array]]:
        kq, *keys = jax.random.split(key, 1 + 2 * layers)
        cache = [jax.random.normal(one, (b, shape.tokens, k, d), jnp.dtype(dtype)) for one in keys]
        return jax.random.normal(kq, (b, 1, heads.heads, d), jnp.dtype(dtype)), cache

    q, cache = make(jax.random.key(0))

    def step(implementation: Any, q: Array, cache: Sequence[Array]) -> Array:
        for key, value in zip(cache[::2], cache[1::2], strict=True):
            q = jax.nn.dot_product_attention(q, key, value, implementation=implementation)
        return q

    times = []
    for implementation in ("xla", "cudnn") if jax.default_backend() == "gpu" else ("xla",):
        try:
            times.append(seconds_of(functools.partial(step, implementation), q, cache) / layers)
        except Exception as error:  # cuDNN refuses some head widths and old devices
            if implementation == "xla":
                raise
            print(f"dot_product_attention: no cuDNN for {shape.name}: {str(error).splitlines()[0]}", flush=True)
    return min(times)


def copy_bandwidth() -> float:
    """Bytes a second of reading and writing one large array: the roof of everything here."""
    size = (1 << 30) if jax.default_backend() == "gpu" else (1 << 28)
    x = jnp.zeros(size // 4, jnp.float32)
    return 2 * size / seconds_of(lambda y: y + 1.0, x)


def seconds_of(function: Callable[..., Any], *operands: Any) -> float:
    """Median seconds of a call, compiled; calls are queued so that the host's share does not count."""
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*operands))
    began = time.perf_counter()
    jax.block_until_ready(compiled(*operands))
    calls = max(1, min(50, int(0.02 / max(time.perf_counter() - began, 1e-6))))
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        out = None
        for _ in range(calls):
            out = compiled(*operands)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - began) / calls)
    return statistics.median(times)
