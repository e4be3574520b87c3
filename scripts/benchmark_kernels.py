"""Speed of the kernels, and memory of a decode step.

    python scripts/benchmark_kernels.py                            # on a GPU: every op and shape
    python scripts/benchmark_kernels.py --cpu --json -             # the XLA implementations at small sizes
    python scripts/benchmark_kernels.py --memory qwen3-4b --json - # a compiled decode step's memory; allocates nothing

Figures, `<op>.<model>.t<tokens>.b<rows>.r<payload ratio>.<figure>`: bytes (that must move, each once), us (a layer),
bandwidth_fraction (of copy_gb_per_s, measured), dense_us and dense_ratio (`jax.nn.dot_product_attention` over all
tokens in the same run; its time over ours). With --cpu also cpu_decode_ratio (dense_ratio at 8,192 tokens, 4 rows,
ratio 0.33) and cpu_full_kv_ratio (the same against `mixed_attention` with all tokens at full precision). With --memory:
temporaries_over_state, state_over_full, all_state_aliased and the bytes behind them. Exit code 0; 1 when a check does
not hold (the last line names its figure); 2 for a bad input.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro
from rich.table import Column, Table

from jaxkv.errors import RequestError
from jaxkv.evaluation.figures import Figure, finish, output_console, parse_checks, run_record, run_script


@dataclasses.dataclass(frozen=True)
class Arguments:
    cpu: bool = False
    """Measure the XLA implementations on the CPU, in float32, at small sizes."""
    memory: str | None = None
    """Compile a decode step of this model (qwen3-4b, qwen3-14b, llama-3.1-8b, smollm2-135m) and report its memory."""
    rows: int = 8
    """Rows of the --memory state."""
    tokens: int = 32_768
    """Tokens a row of the --memory state; 20 % of them at full precision, 50 % in INT4, the rest released."""
    target: str = "cpu"
    """What the --memory step is compiled for: cpu (float32), or sm_80, sm_89, sm_90 (bfloat16; extra `aot`, no GPU)."""
    layers: int = 8
    """Caches that a measurement goes through, one after the other; 1 with --cpu."""
    seconds: float = 240.0
    """No measurement starts after so many."""
    json: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the figures as JSON; - is standard output, alone."""
    check: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="EXPRESSION")] = ()
    """A bound on a figure, such as 'cpu_decode_ratio >= 2'; repeatable."""
    run_json: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write versions, configuration and figures."""


def main(arguments: Arguments) -> int:
    for name in ("rows", "tokens", "layers"):
        if getattr(arguments, name) < 1:
            raise RequestError(f"--{name} {getattr(arguments, name)} is below 1; give at least 1")
    checks = parse_checks(arguments.check)
    if arguments.memory is None and arguments.target != "cpu":
        raise RequestError(f"--target {arguments.target} is for --memory; speed is measured on the device that is here")
    if arguments.cpu or arguments.memory is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"
    figures = memory(arguments) if arguments.memory is not None else speed(arguments)
    if arguments.run_json:
        run_record(arguments.run_json, arguments, figures)
    return finish(figures, arguments.json, checks)


def memory(arguments: Arguments) -> dict[str, Figure]:
    from jaxkv.evaluation.decode_memory import SHAPES, decode_memory

    if arguments.memory not in SHAPES:
        raise RequestError(f"--memory {arguments.memory} is unknown; choose one of {', '.join(SHAPES)}")
    shares = {"rows": arguments.rows, "tokens": arguments.tokens, "high": 0.2, "low": 0.5}
    return {"target": arguments.target, **decode_memory(SHAPES[arguments.memory], target=arguments.target, **shares)}


def speed(arguments: Arguments) -> dict[str, Figure]:
    import jax

    from jaxkv.evaluation.kernel_benchmark import CPU_SHAPES, benchmark, gpu_shapes

    gpu = jax.default_backend() == "gpu"
    if not gpu and not arguments.cpu:
        raise RequestError(f"no GPU here, only {jax.default_backend()}; --cpu measures the XLA implementations")
    console = output_console(arguments.json)
    figures: dict[str, Figure] = {"device": jax.devices()[0].device_kind}
    with console.status("measuring") as status:
        for part in benchmark(
            gpu_shapes() if gpu else CPU_SHAPES,
            layers=arguments.layers if gpu else 1,
            seconds=arguments.seconds,
            dtype="bfloat16" if gpu else "float32",
        ):
            figures |= part
            status.update(f"{len(figures)} figures, last {next(iter(part)).rpartition('.')[0]}")
    if not gpu:
        at = "mixed_attention.qwen3-4b.t8192.b4"
        figures["cpu_decode_ratio"] = figures[f"{at}.r0.33.dense_ratio"]
        figures["cpu_full_kv_ratio"] = _ratio(figures[f"{at}.r1.0.us"], figures[f"{at}.r0.33.us"])
    console.print(table(figures))
    return figures


def _ratio(a: Figure, b: Figure) -> Figure:
    return a / b if isinstance(a, float) and isinstance(b, float) else None


def table(figures: dict[str, Figure]) -> Table:
    """One line a measurement."""
    columns = ("us", "bandwidth_fraction", "dense_us", "dense_ratio")
    lines = Table(Column("measurement", overflow="fold"), *columns)
    for name in dict.fromkeys(name.rpartition(".")[0] for name in figures if name.endswith(".us")):
        cells = (figures.get(f"{name}.{column}") for column in columns)
        lines.add_row(name, *(f"{cell:.3g}" if isinstance(cell, float) else "-" for cell in cells))
    return lines


def cli(arguments: Sequence[str] | None = None) -> int:
    """Run the script with these command-line arguments, by default the process's; gives the exit code."""
    parsed = tyro.cli(Arguments, description=__doc__, args=arguments)
    return run_script(lambda: main(parsed))


if __name__ == "__main__":
    sys.exit(cli())
