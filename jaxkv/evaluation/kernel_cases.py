"""Every kernel on every route, head width and combination of partitions: one list for all that checks kernels.

A case makes random operands, or their shapes alone, calls its op with an implementation, and knows a float32 reference:
plain attention over the dequantised cache, one softmax, nothing blocked.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.ops.layer_kv import DensePart, LayerKV, LowPart
from jaxkv.ops.mixed_attention import mixed_attention
from jaxkv.ops.partials import MASKED
from jaxkv.ops.quantize import dequantize, quantize

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
    """All cases at a size: the full product with plain contents, and every other content on two routes."""
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


def dequantized(layer: LayerKV, head_dim: int) -> tuple[Float[Array, "B K S D"], Float[Array, "B K S D"], Array]:
    """Keys, values and positions [B, S] of all slots, high then low then recent, in float32."""
    low = layer.low
    k = [layer.high.k, dequantize(low.k_codes, low.k_scale, head_dim), layer.recent.k]
    v = [layer.high.v, dequantize(low.v_codes, low.v_scale, head_dim), layer.recent.v]
    position = [layer.high.position, low.position, layer.recent.position]
    return (
        jnp.concatenate([x.astype(jnp.float32) for x in k], axis=2),
        jnp.concatenate([x.astype(jnp.float32) for x in v], axis=2),
        jnp.concatenate(position, axis=1),
    )


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


def plain_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    k_position: Int[Array, "B S"],
    q_position: Int[Array, "B T"],
    sink_logits: Float[Array, "H"] | None = None,
    *,
    scale: float,
    window: int | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Output and log-sum-exp of one plain softmax in float32; zeros and MASKED for a query that sees nothing."""
    group = q.shape[2] // k.shape[1]
    k, v = (jnp.repeat(x.astype(jnp.float32), group, axis=1) for x in (k, v))
    highest = lax.Precision.HIGHEST
    scores = jnp.einsum("bthd,bhsd->bths", q.astype(jnp.float32), k, precision=highest) * scale
    keys, queries = k_position[:, None, :], q_position[:, :, None]
    seen = (keys >= 0) & (keys <= queries)
    if window is not None:
        seen &= keys > queries - window
    seen = jnp.broadcast_to(seen[:, :, None], scores.shape)
    if sink_logits is not None:
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink_logits[:, None], (*scores.shape[:3], 1))], axis=3)
        v = jnp.concatenate([v, jnp.zeros_like(v[:, :, :1])], axis=2)
        seen = jnp.concatenate([seen, jnp.ones_like(seen[..., :1])], axis=3)
    scores = jnp.where(seen, scores, -jnp.inf)
    some = seen.any(axis=3)
    top = jnp.where(some, scores.max(axis=3), 0.0)
    weights = jnp.exp(scores - top[..., None])
    total = weights.sum(axis=3)
    out = jnp.einsum("bths,bhsd->bthd", weights, v, precision=highest) / jnp.where(some, total, 1.0)[..., None]
    return out, jnp.where(some, top + jnp.log(jnp.where(some, total, 1.0)), MASKED)


def relative_error(found: Any, wanted: Any) -> float:
    """The largest relative norm of the error over the outputs of a call; infinite where a number is not finite.

    Log-sum-exps of nothing (MASKED) have to agree exactly and do not count towards the norm.
    """
    worst = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        nothing = y == MASKED
        if x.shape != y.shape or not np.isfinite(x).all() or not ((x == MASKED) == nothing).all():
            return float("inf")
        x, y = x[~nothing], y[~nothing]
        norm = np.linalg.norm(y)
        worst = max(worst, float(np.linalg.norm(x - y) / norm) if norm else float(np.abs(x).max(initial=0.0)))
    return worst
