"""Measure block sizes of the kernels on this GPU and store the fastest in jaxkv/pallas/configs/.

    python scripts/tune_kernels.py --ops mixed_attention --head-dims 64,128

Each op and head width is written as soon as it is measured; an interrupted run keeps what it has. A stored
configuration stays unless another is at least 2 % faster. Run `make aot` afterwards: it checks the new kernels for
register spills. Exit code 0; 2 for a bad input or no GPU.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from jaxkv.errors import KernelError, RequestError
from jaxkv.evaluation.figures import Figure, finish, output_console, run_script


@dataclasses.dataclass(frozen=True)
class Arguments:
    ops: str = ""
    """Comma-separated; all by default."""
    head_dims: str = ""
    """Comma-separated; 64, 80, 96, 128 and 256 by default."""
    dry_run: bool = False
    """Measure, write nothing."""
    json: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the figures <op>.d<width>.us and .ratio (stored configuration's time over the fastest's); - is standard
    output, alone."""


def main(arguments: Arguments) -> int:
    import jax

    from jaxkv.evaluation import kernel_tuning as tuning
    from jaxkv.pallas.configs import architecture, load_config, write

    ops = tuple(filter(None, arguments.ops.split(","))) or tuning.OPS
    if unknown := [op for op in ops if op not in tuning.OPS]:
        raise RequestError(f"--ops {unknown[0]} is unknown; choose from {', '.join(tuning.OPS)}")
    try:
        widths = tuple(int(width) for width in filter(None, arguments.head_dims.split(","))) or tuning.HEAD_DIMS
    except ValueError:
        raise RequestError(
            f"--head-dims {arguments.head_dims} is not a list of numbers; give for example 64,128"
        ) from None
    if unknown_widths := [width for width in widths if width not in tuning.HEAD_DIMS]:
        raise RequestError(f"--head-dims {unknown_widths[0]} is not one of {', '.join(map(str, tuning.HEAD_DIMS))}")
    if jax.default_backend() != "gpu":
        raise KernelError(
            f"no GPU here, only {jax.default_backend()}; block sizes are measured on the GPU they are for"
        )

    console = output_console(arguments.json)
    device, name = jax.devices()[0], architecture()
    figures: dict[str, Figure] = {"device": device.device_kind, "architecture": name}
    for op in ops:
        for width in widths:
            present = load_config(op, width)
            tried = list(tuning.candidates(op, width, getattr(device, "core_count", 132)))
            config, results = tuning.best(tried, tuning.measurement(op, width), present)
            took, before = results[config], results[present]
            figures[f"{op}.d{width}.us"] = took * 1e6 if isinstance(took, float) else None
            ratio = before / took if isinstance(before, float) and isinstance(took, float) else None
            figures[f"{op}.d{width}.ratio"] = ratio
            console.print(f"{op} d{width}: {config}, {figures[f'{op}.d{width}.us']} us, ratio {ratio}", soft_wrap=True)
            if not arguments.dry_run:
                write(op, tuning.retuned(op, name, {width: config}))
    return finish(figures, arguments.json)


def cli(arguments: Sequence[str] | None = None) -> int:
    """Run the script with these command-line arguments, by default the process's; gives the exit code."""
    parsed = tyro.cli(Arguments, description=__doc__, args=arguments)
    return run_script(lambda: main(parsed))


if __name__ == "__main__":
    sys.exit(cli())
