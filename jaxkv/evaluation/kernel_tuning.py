"""Choice of the kernels' block sizes by measurement, on the GPU that is here."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from jaxtyping import Array

from jaxkv.errors import KernelError
from jaxkv.evaluation.kernel_benchmark import Heads, Shape, operands_of, probe_operands, seconds_of, vectors_of
from jaxkv.pallas.attention_mass import attention_mass_triton
from jaxkv.pallas.configs import Config, stored
from jaxkv.pallas.deletion_effect import deletion_effect_triton
from jaxkv.pallas.mixed_attention import mixed_attention_triton
from jaxkv.pallas.quantize import quantize_triton

OPS: Final = ("mixed_attention", "mixed_attention_chunk", "deletion_effect", "attention_mass", "quantize")
HEAD_DIMS: Final = (64, 80, 96, 128, 256)
# A long cache of a small batch: the case that block sizes and splits matter for.
SHAPE: Final = Shape("qwen3-4b", tokens=32_768, rows=8, ratio="0.33")
LAYERS: Final = 4
CHUNK: Final = 64


def candidates(op: str, head_dim: int, multiprocessors: int) -> Iterator[Config]:
    """Configs worth trying; what needs more shared memory or registers than there is fails to compile."""
    rows = (16, 32, 64) if op == "mixed_attention_chunk" else (16,)
    waves = (1, 2, 4) if op.startswith("mixed_attention") else (0,)
    for block, warps, stages, query_rows, wave in itertools.product(
        (16, 32, 64, 128), (2, 4, 8), (1, 2, 3), rows, waves
    ):
        if block * head_dim <= 128 * 128 and query_rows * head_dim <= 64 * 128:
            yield Config(block, warps, stages, query_rows=query_rows, programs=max(1, wave * multiprocessors))


def measurement(op: str, head_dim: int) -> Callable[[Config], float]:
    """A function from a config to the seconds of one call of the op with a head width, operands made once."""
    heads = Heads(heads=32, kv_heads=8, head_dim=head_dim)
    scale = head_dim**-0.5
    if op == "quantize":
        x = vectors_of(heads, SHAPE, LAYERS, "bfloat16")
        return lambda config: seconds_of(lambda y: [quantize_triton(one, config=config) for one in y], x) / LAYERS
    if op.startswith("mixed_attention"):
        tokens = CHUNK if op == "mixed_attention_chunk" else 1
        q, caches, position, new = operands_of(heads, SHAPE, LAYERS, "bfloat16", queries=tokens)

        def attend(config: Config) -> float:
            def step(q: Array, caches: Sequence[Any], position: Array, new: Any) -> Array:
                for cache in caches:
                    q, _ = mixed_attention_triton(
                        q, cache, position, new, None, scale=scale, window=None, config=config
                    )
                return q

            return seconds_of(step, q, caches, position, new) / LAYERS

        return attend
    q, caches, position, lse, pages = probe_operands(heads, SHAPE, LAYERS, "bfloat16")
    if op == "attention_mass":
        return lambda config: (
            seconds_of(
                lambda c: [
                    attention_mass_triton(q, position, lse, layer, scale=scale, window=None, config=config)
                    for layer in c
                ],
                caches,
            )
            / LAYERS
        )
    return lambda config: (
        seconds_of(
            lambda c: [
                deletion_effect_triton(q, position, lse, layer, pages, scale=scale, window=None, config=config)
                for layer in c
            ],
            caches,
        )
        / LAYERS
    )


def best(
    configs: Sequence[Config], seconds: Callable[[Config], float], present: Config | None = None
) -> tuple[Config, dict[Config, float | str]]:
    """The fastest config, and what each took or why it does not run.

    `present`, the stored config, stays unless another is at least 2 % faster: ties must not rewrite the table.

    Raises:
      KernelError: no config runs.
    """
    results: dict[Config, float | str] = {}
    for config in [*([present] if present else []), *configs]:
        if config in results:
            continue
        try:
            results[config] = seconds(config)
        except Exception as error:  # too many registers, too much shared memory: other candidates go on
            results[config] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    times = {config: took for config, took in results.items() if isinstance(took, float)}
    if not times:
        reasons = "; ".join(sorted({str(reason) for reason in results.values()}))
        raise KernelError(f"none of {len(results)} configurations runs here: {reasons}")
    fastest = min(times, key=times.__getitem__)
    if present in times and times[present] <= 1.02 * times[fastest]:
        return present, results
    return fastest, results


def retuned(op: str, architecture: str, chosen: dict[int, Config]) -> dict[str, dict[int, Config]]:
    """The stored table of an op with some head widths of an architecture replaced."""
    table = {name: dict(rows) for name, rows in stored(op).items()}
    table[architecture] = dict(sorted((table.get(architecture, {}) | chosen).items()))
    return table
