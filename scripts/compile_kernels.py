"""Compile every kernel for every CUDA architecture, on a machine without one, and hold it against the baseline.

    python scripts/compile_kernels.py --cases 'mixed_attention.*-d64-*' --targets sm_80 --json figures.json

Needs jax's CUDA plugin (`pip install 'jaxkv[aot]'`; `make aot` has it in an environment of its own). Prints registers,
spilled bytes and shared memory of each kernel. Exit code 0; 1 when a kernel does not compile, spills, or is larger than
in the baseline, or when baseline and cases do not match (each is named); 2 for a bad input or a missing plugin.
--write-baseline stores what was measured, and is refused while anything spills or does not compile.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.progress import track

from jaxkv.errors import EvaluationError
from jaxkv.evaluation.figures import check, emit, output_console, parse_checks, run_script

BASELINE = Path(__file__).parent.parent / "tests" / "kernels" / "compile_baseline.json"


@dataclasses.dataclass(frozen=True)
class Arguments:
    cases: tuple[str, ...] = ()
    """Patterns of case names, such as 'mixed_attention.*-d64-*'; all by default."""
    targets: tuple[str, ...] = ()
    """Architectures; sm_80, sm_89 and sm_90 by default."""
    baseline: Path = BASELINE
    """What the results are held against."""
    write_baseline: bool = False
    """Store the results in the baseline, for the cases and targets that were compiled."""
    jobs: int = os.cpu_count() or 1
    """Compilations at a time."""
    json: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the figures as JSON; - is standard output, alone."""
    check: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="EXPRESSION")] = ()
    """A bound on a figure, such as 'registers_max <= 255'; repeatable."""


def main(arguments: Arguments) -> int:
    if arguments.jobs < 1:
        raise EvaluationError(f"--jobs is {arguments.jobs}; at least 1 is needed")
    checks = parse_checks(arguments.check)
    # The plugin registers without a GPU only if JAX is told not to look for one, and a program that comes from the
    # compilation cache leaves no dump to measure. Both are read when JAX is imported.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from jaxkv.evaluation import kernel_compile
    from jaxkv.pallas.gates import require_plugin

    require_plugin()
    console = output_console(arguments.json)
    chosen = kernel_compile.select(arguments.cases, arguments.targets)
    in_scope = kernel_compile.scope(arguments.cases, arguments.targets)
    known = {}
    # A first baseline has nothing to be merged with.
    if arguments.baseline.exists() or not arguments.write_baseline:
        known = kernel_compile.read_baseline(arguments.baseline)

    start = time.monotonic()
    results = []
    compiling = kernel_compile.compile_cases(chosen, arguments.jobs)
    for result in track(compiling, "compiling", total=len(chosen), console=console):
        results.append(result)
        # A log shows no bar.
        if not console.is_terminal:
            console.print(f"{len(results)}/{len(chosen)} {result.name}")
    console.print(kernel_compile.table(results), soft_wrap=True)
    console.print(f"{len(results)} compilations in {time.monotonic() - start:.0f} s")
    if arguments.write_baseline:
        measured = {name: entry for result in results for name, entry in result.entries().items()}
        failures = kernel_compile.regressions(results, measured)
        if failures:
            console.print(f"{arguments.baseline} is left as it was")
        else:
            kept = {name: entry for name, entry in known.items() if not in_scope(name)}
            kernel_compile.write_baseline(arguments.baseline, results, kept)
    else:
        failures = kernel_compile.regressions(results, known, in_scope)
    found = kernel_compile.figures(results, failures)
    if arguments.json is not None:
        emit(found, arguments.json)
    failures += check(found, checks)
    for failure in failures:
        print(f"gate failed: {failure}", file=sys.stderr if arguments.json == "-" else sys.stdout, flush=True)
    return 1 if failures else 0


def cli(arguments: Sequence[str] | None = None) -> int:
    """Run the script with these command-line arguments, by default the process's; gives the exit code."""
    parsed = tyro.cli(Arguments, description=__doc__, args=arguments)
    return run_script(lambda: main(parsed))


if __name__ == "__main__":
    sys.exit(cli())
