"""Every kernel on every route, head width and combination of partitions: one list for all that checks kernels.

A case makes random operands, or their shapes alone, calls its op with an implementation, and knows a float32 reference
(`kernel_references`).
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxkv.evaluation.kernel_references import dequantized, plain_attention, plain_probabilities
from jaxkv.ops.attention_mass import attention_mass
from jaxkv.ops.deletion_effect import deletion_effect
from jaxkv.ops.layer_kv import DensePart, LayerKV, LowPart
from jaxkv.ops.mixed_attention import mixed_attention
from jaxkv.ops.quantize import SMALLEST_SCALE, dequantize, quantize

HEAD_DIMS: Final = (64, 80, 96, 128, 256)
DTYPES: Final = ("bfloat16", "float32")
# Relative norm of the error against the float32 reference, by the dtype of the inputs.
TOLERANCE: Final = {"bfloat16": 1e-2, "float32": 2e-3}


@dataclasses.dataclass(frozen=True)
class Route:
    """Heads and new tokens of a call: `group` query heads share a KV head."""

    name: str
    kv_heads: int
    group: int
    tokens: int = 1


ROUTES: Final = (
    Route("one_head", 4, 1),
    Route("gqa2", 2, 2),
    Route("gqa4", 2, 4),
    Route("gqa3_padded", 2, 3),
    Route("gqa8", 1, 8),
    Route("chunk", 2, 4, tokens=7),
)


@dataclasses.dataclass(frozen=True)
class Size:
    """Rows and slots of a case."""

    rows: int
    high: int
    low: int
    recent: int


SMALL: Final = Size(rows=2, high=192, low=320, recent=16)
LARGE: Final = Size(rows=8, high=6656, low=16384, recent=16)
PAGES: Final = 9
PAGE_SLOTS: Final = 16
PARTITIONS: Final = {
    "all": ("high", "low", "recent"),
    "no_high": ("low", "recent"),
    "no_low": ("high", "recent"),
    "recent_only": ("recent",),
}


@dataclasses.dataclass(frozen=True)
class Content:
    """What the slots hold.

    `occupied` is the share of a partition's slots in use, a prefix; 0 leaves one token in all. `outlier` multiplies one
    channel of the keys. A `window` or sink logits are options of the call.
    """

    name: str = "plain"
    occupied: float = 0.8
    outlier: float = 1.0
    window: int | None = None
    sinks: bool = False


PLAIN: Final = Content()
CONTENTS: Final = (
    Content("outlier_keys", outlier=100.0),
    Content("long_empty_runs", occupied=0.05),
    Content("one_token", occupied=0.0),
    Content("window", window=40),
    Content("sinks", sinks=True),
    Content("window_sinks", window=40, sinks=True),
)


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """One call of one op.

    `make(source)` gives the operands, `call(implementation, *operands)` the op's outputs, `reference(*operands)` the
    same in float32 without kernel, blocks or cache parts.
    """

    op: str
    name: str
    route: str
    head_dim: int
    dtype: str
    make: Callable[["Source"], tuple[Any, ...]]
    call: Callable[..., Any]
    reference: Callable[..., Any]

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    def operands(self, seed: int) -> tuple[Any, ...]:
        """Random operands on the default device."""
        return self.make(Source(np.random.default_rng(seed)))

    def abstract(self) -> tuple[Any, ...]:
        """The operands' shapes and dtypes, nothing allocated."""
        return jax.eval_shape(lambda: self.make(Source(None)))


class Source:
    """Random numbers made by NumPy, which compiles nothing; or, without a generator, zeros for `jax.eval_shape`."""

    def __init__(self, rng: np.random.Generator | None) -> None:
        self.rng = rng

    def normal(self, *shape: int) -> Array:
        """Standard normal values in float32."""
        return jnp.zeros(shape) if self.rng is None else jnp.asarray(self.rng.standard_normal(shape, np.float32))

    def order(self, rows: int, length: int) -> np.ndarray:
        """A permutation of `length` positions in each row."""
        rng = self.rng or np.random.default_rng(0)
        return np.stack([rng.permutation(length) for _ in range(rows)]).astype(np.int32)


_quantize = jax.jit(quantize)


def cases(size: Size = SMALL) -> tuple[KernelCase, ...]:
    """All cases at a size: the full product with plain contents, and every other content on two widths.

    Ops over numbered slots read all partitions in one way: fewer of these combinations are another path.
    """
    found = [
        mixed_attention_case(route, head_dim, dtype, partitions, PLAIN, size)
        for route, head_dim, dtype, partitions in itertools.product(ROUTES, HEAD_DIMS, DTYPES, PARTITIONS)
    ]
    found += [
        mixed_attention_case(route, head_dim, dtype, "all", content, size)
        for content, route, (head_dim, dtype) in itertools.product(
            CONTENTS, ROUTES, ((64, "float32"), (128, "bfloat16"))
        )
    ]
    for op in ("deletion_effect", "attention_mass"):
        found += [
            slots_case(op, route, head_dim, dtype, "all", PLAIN, size)
            for route, head_dim, dtype in itertools.product(ROUTES, HEAD_DIMS, DTYPES)
        ]
        found += [
            slots_case(op, route, 64, "float32", partitions, content, size)
            for route in ROUTES
            if route.name in ("gqa3_padded", "chunk")
            for partitions, content in (
                *((name, PLAIN) for name in PARTITIONS if name != "all"),
                *(("all", content) for content in CONTENTS),
            )
        ]
    found += [quantize_case(head_dim, dtype, size) for head_dim, dtype in itertools.product(HEAD_DIMS, DTYPES)]
    return tuple(found)


def random_layer(
    source: Source, size: Size, kv_heads: int, head_dim: int, dtype: str, partitions: str, content: Content
) -> LayerKV:
    """A layer whose tokens lie in random partitions; position p of a row is in one place at most."""
    slots = {name: getattr(size, name) if name in PARTITIONS[partitions] else 0 for name in ("high", "low", "recent")}
    order = source.order(size.rows, sum(slots.values()))
    positions, start = {}, 0
    for name, count in slots.items():
        used = round(content.occupied * count) if content.occupied else int(name == "recent")
        position = order[:, start : start + count].copy()
        position[:, used:] = -1
        positions[name] = jnp.asarray(position)
        start += count
    channel = np.ones(head_dim, np.float32)
    channel[head_dim // 3] = content.outlier

    def values(name: str) -> Array:
        return source.normal(size.rows, kv_heads, slots[name], head_dim)

    def dense(name: str) -> DensePart:
        return DensePart((values(name) * channel).astype(dtype), values(name).astype(dtype), positions[name])

    k_codes, k_scale = _quantize(values("low") * channel)
    v_codes, v_scale = _quantize(values("low"))
    return LayerKV(dense("high"), LowPart(k_codes, v_codes, k_scale, v_scale, positions["low"]), dense("recent"))


def mixed_attention_case(
    route: Route, head_dim: int, dtype: str, partitions: str, content: Content, size: Size
) -> KernelCase:
    """One case of `mixed_attention`."""
    heads = route.kv_heads * route.group
    length = size.high + size.low + size.recent
    options: dict[str, Any] = {"scale": head_dim**-0.5, "window": content.window}

    def make(source: Source) -> tuple[Any, ...]:
        q = source.normal(size.rows, route.tokens, heads, head_dim).astype(dtype)
        new = [source.normal(size.rows, route.tokens, route.kv_heads, head_dim).astype(dtype) for _ in range(2)]
        position = length + np.arange(route.tokens) + np.zeros((size.rows, 1), np.int32)
        if route.tokens > 1:
            position[-1, -2:] = -1  # padding
        sinks = source.normal(heads) if content.sinks else None
        layer = random_layer(source, size, route.kv_heads, head_dim, dtype, partitions, content)
        return q, layer, jnp.asarray(position, jnp.int32), (new[0], new[1]), sinks

    def call(implementation: str | None, q: Array, layer: LayerKV, position: Array, new: Any, sinks: Any) -> Any:
        return mixed_attention(
            q,
            layer,
            position,
            new_kv=new,
            sink_logits=sinks,
            return_lse=True,
            implementation=implementation,
            **options,
        )

    def reference(q: Array, layer: LayerKV, position: Array, new: Any, sinks: Any) -> Any:
        k, v, at = dequantized(layer, head_dim)
        k, v = (
            jnp.concatenate([x, n.swapaxes(1, 2).astype(jnp.float32)], axis=2) for x, n in zip((k, v), new, strict=True)
        )
        return plain_attention(q, k, v, jnp.concatenate([at, position], axis=1), position, sinks, **options)

    name = f"{route.name}-d{head_dim}-{dtype}-{partitions}-{content.name}"
    return KernelCase("mixed_attention", name, route.name, head_dim, dtype, make, call, reference)


def slots_case(
    op: str, route: Route, head_dim: int, dtype: str, partitions: str, content: Content, size: Size
) -> KernelCase:
    """One case of an op over numbered slots, `deletion_effect` or `attention_mass`; half of the keys are visible."""
    heads = route.kv_heads * route.group
    length = size.high + size.low + size.recent
    options: dict[str, Any] = {"scale": head_dim**-0.5, "window": content.window}

    def make(source: Source) -> tuple[Any, ...]:
        q = source.normal(size.rows, route.tokens, heads, head_dim).astype(dtype)
        position = length // 2 + np.arange(route.tokens) + np.zeros((size.rows, 1), np.int32)
        if route.tokens > 1:
            position[-1, -2:] = -1  # padding
        q_position = jnp.asarray(position, jnp.int32)
        sinks = source.normal(heads) if content.sinks else None
        layer = random_layer(source, size, route.kv_heads, head_dim, dtype, partitions, content)
        k, v, at = dequantized(layer, head_dim)
        _, lse = plain_attention(q, k, v, at, q_position, sinks, **options)
        pages = np.full((size.rows, PAGES * PAGE_SLOTS), -1, np.int32)
        order = source.order(size.rows, at.shape[1])[:, : pages.shape[1]]
        pages[:, : order.shape[1]] = order
        pages = jnp.asarray(pages[:, ::-1].reshape(size.rows, PAGES, PAGE_SLOTS))
        return q, q_position, lse, layer, *((pages,) if op == "deletion_effect" else ())

    def call(implementation: str | None, *operands: Any) -> Any:
        chosen = deletion_effect if op == "deletion_effect" else attention_mass
        return chosen(*operands, implementation=implementation, **options)

    def reference(q: Array, q_position: Array, lse: Array, layer: LayerKV, *pages: Array) -> Any:
        k, v, at = dequantized(layer, head_dim)
        a = plain_probabilities(q, k, at, q_position, lse, **options)
        if op == "attention_mass":
            return a.sum(axis=1).reshape(size.rows, route.kv_heads, route.group, -1).sum(axis=2)
        members = jax.nn.one_hot(pages[0], at.shape[1]).sum(axis=2)
        a = jnp.einsum("bths,bps->bphts", a, members)
        u = jnp.einsum("bphts,bhsd->bphtd", a, jnp.repeat(v, route.group, axis=1), precision="highest")
        return a.sum(axis=4), u

    name = f"{route.name}-d{head_dim}-{dtype}-{partitions}-{content.name}"
    return KernelCase(op, name, route.name, head_dim, dtype, make, call, reference)


def quantize_case(head_dim: int, dtype: str, size: Size) -> KernelCase:
    """One case of `quantize`, of what one row's `low` holds; the numbers compared are dequantised."""

    def make(source: Source) -> tuple[Any, ...]:
        return (source.normal(2, size.low, head_dim).at[0, 0].set(0.0).astype(dtype),)

    def call(implementation: str | None, x: Array) -> Any:
        codes, scale = quantize(x, implementation=implementation)
        return dequantize(codes, scale, head_dim), scale

    def reference(x: Array) -> Any:
        x = x.astype(jnp.float32)
        largest = jnp.abs(x).max(axis=-1)
        scale = jnp.where(largest > 0, jnp.maximum(largest / 7, SMALLEST_SCALE), 1.0).astype(jnp.float16)
        step = scale.astype(jnp.float32)[..., None]
        return jnp.clip(jnp.round(x / step), -7, 7) * step, scale

    return KernelCase("quantize", f"vectors-d{head_dim}-{dtype}", "vectors", head_dim, dtype, make, call, reference)
