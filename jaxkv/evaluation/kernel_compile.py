"""What the compiler makes of every kernel on every CUDA architecture, held against a committed baseline.

The compiler has no GPU to run on (`jaxkv.pallas.gates.compile_for`), so this says nothing about speed. It says whether
a kernel compiles at all, whether it spills registers to memory, and whether a change made it larger.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import jax
from rich.table import Table

from jaxkv.errors import KernelError
from jaxkv.evaluation.figures import Figure, write_atomically
from jaxkv.evaluation.kernel_cases import LARGE, KernelCase, cases
from jaxkv.pallas.gates import CompiledKernel, compile_for
from jaxkv.pallas.targets import COMPILED

IMPLEMENTATION: Final = "triton"
# Registers come in steps of 8 a thread; 1 KiB is what the driver reserves of a block's shared memory.
MORE_REGISTERS: Final = 8
MORE_SHARED_BYTES: Final = 1024
# A group of three is padded to the same tile as one of eight.
SAME_KERNEL: Final = ("gqa3_padded",)


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One case on one target: its kernels, or the reason why there are none."""

    op: str
    case: str
    head_dim: int
    dtype: str
    target: str
    kernels: tuple[CompiledKernel, ...] = ()
    error: str | None = None

    @property
    def name(self) -> str:
        return f"{self.op}.{self.case}.{self.target}"

    def entries(self) -> dict[str, dict[str, int]]:
        """What the baseline stores of it: name with kernel -> registers, spill_bytes and shared_bytes."""
        return {f"{self.name}.{kernel.name}": _limits(kernel) for kernel in self.kernels}


def _limits(kernel: CompiledKernel) -> dict[str, int]:
    return {
        "registers": kernel.registers,
        "spill_bytes": kernel.spill_bytes,
        "shared_bytes": kernel.shared_bytes,
    }


@functools.cache
def compiled_cases() -> Mapping[str, KernelCase]:
    """The cases that are compiled, by name: each op, route and head width in bfloat16, and one width in float32.

    Of a list's cases of one kind the first is taken, which has every partition and plain contents: the others leave out
    code. Operands have a realistic capacity; nothing of it is allocated.
    """
    found: dict[str, KernelCase] = {}
    for case in cases(LARGE):
        if case.route in SAME_KERNEL or (case.dtype == "float32" and case.head_dim != 128):
            continue
        found.setdefault(f"{case.op}.{case.route}-d{case.head_dim}-{case.dtype}", case)
    return found


def select(patterns: Sequence[str], targets: Sequence[str]) -> list[tuple[str, KernelCase, str]]:
    """Name, case and target of what is compiled: cases whose name matches a pattern (`mixed_attention.*-d64-*`).

    Raises:
      KernelError: a target cannot be compiled for, or nothing matches.
    """
    if unknown := [target for target in targets if target not in COMPILED]:
        raise KernelError(f"kernels cannot be compiled for '{unknown[0]}' here; choose from {', '.join(COMPILED)}")
    found = [
        (name, case, target)
        for name, case in compiled_cases().items()
        if _matches(name, patterns)
        for target in targets or COMPILED
    ]
    if not found:
        raise KernelError(
            f"no case matches {' or '.join(patterns)}; names look like {', '.join(list(compiled_cases())[:2])}, and "
            "* stands for anything"
        )
    return found


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def compile_cases(
    chosen: Sequence[tuple[str, KernelCase, str]],
    jobs: int = 1,
    compiler: Callable[..., tuple[CompiledKernel, ...]] = compile_for,
) -> Iterator[Compilation]:
    """Compile, `jobs` at a time; a case that does not lower or compile is a result with an error."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda one: _compile(one[0], one[1], one[2], compiler), chosen)


def _compile(name: str, case: KernelCase, target: str, compiler: Callable[..., Any]) -> Compilation:
    op, _, short = name.partition(".")
    result = Compilation(op, short, case.head_dim, case.dtype, target)
    try:
        kernels = compiler(functools.partial(case.call, IMPLEMENTATION), case.abstract(), target)
    # Pallas refuses a kernel with any class of error; each is one case's result, and the others go on.
    except Exception as error:
        words = " ".join(str(error).split())[:600]
        if not isinstance(error, KernelError):
            words = f"does not lower: {type(error).__name__}: {words}"
        return dataclasses.replace(result, error=words)
    if not kernels:
        return dataclasses.replace(result, error=f"no kernel was launched for implementation '{IMPLEMENTATION}'")
    return dataclasses.replace(result, kernels=kernels)


def regressions(
    results: Sequence[Compilation],
    baseline: Mapping[str, Mapping[str, int]],
    in_scope: Callable[[str], bool] = lambda name: True,
) -> list[str]:
    """What fails the gate, one sentence each; empty when nothing does.

    A case that does not compile, spilled registers, more than 8 registers or 1,024 bytes of shared memory over the
    baseline, a kernel that the baseline lacks, and an entry of the baseline (`in_scope` says which were compiled) whose
    case is gone.
    """
    found = [f"{result.name}: {result.error}" for result in results if result.error]
    measured = {name: entry for result in results for name, entry in result.entries().items()}
    refresh = "refresh it with --write-baseline if that is meant"
    for name, entry in measured.items():
        if entry["spill_bytes"]:
            found.append(
                f"{name}: spills {entry['spill_bytes']:,} bytes a thread and 0 is the limit; choose smaller blocks or "
                "more warps in jaxkv/pallas/configs"
            )
        known = baseline.get(name)
        if known is None:
            found.append(f"{name}: is not in the baseline; {refresh}")
            continue
        for key, more, unit in (
            ("registers", MORE_REGISTERS, "registers"),
            ("shared_bytes", MORE_SHARED_BYTES, "bytes of shared memory"),
        ):
            if entry[key] > known[key] + more:
                found.append(
                    f"{name}: {entry[key]:,} {unit}, the baseline has {known[key]:,} and {more:,} more are allowed; "
                    f"{refresh}"
                )
    failed = tuple(f"{result.name}." for result in results if result.error)
    for name in baseline:
        if name not in measured and in_scope(name) and not name.startswith(failed):
            found.append(f"{name}: is in the baseline and not among the compiled kernels; {refresh}")
    return found


def scope(patterns: Sequence[str], targets: Sequence[str]) -> Callable[[str], bool]:
    """Whether a baseline entry is of a case and target that were asked for."""

    def within(entry: str) -> bool:
        case, target, _ = entry.rsplit(".", 2)
        return _matches(case, patterns) and (not targets or target in targets)

    return within


def read_baseline(path: Path) -> dict[str, dict[str, int]]:
    """The kernels of a baseline file.

    Raises:
      KernelError: the file is missing or malformed, or is of another version of jax: its compiler numbers differ.
    """
    try:
        stored = json.loads(path.read_text())
        version, kernels = stored["jax"], stored["kernels"]
        well_formed = all(
            len(name.split(".")) >= 4 and set(entry) == {"registers", "spill_bytes", "shared_bytes"}
            for name, entry in kernels.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise KernelError(f"{path} is no readable compile baseline ({error}); make one by --write-baseline") from None
    if not well_formed:
        raise KernelError(f"{path} has a malformed entry; make it anew by --write-baseline")
    if version != jax.__version__:
        raise KernelError(
            f"{path} was made with jax {version} and this is jax {jax.__version__}, whose compiler differs; use jax "
            f"{version} (`make aot` does), or make a baseline of your own by --baseline FILE --write-baseline"
        )
    return kernels


def write_baseline(path: Path, results: Sequence[Compilation], kept: Mapping[str, Mapping[str, int]]) -> None:
    """Write the results, and of the old baseline what was not compiled now; one line a kernel, sorted."""
    entries = dict(kept)
    for result in results:
        entries |= result.entries()
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(entries[name])}" for name in sorted(entries))
    write_atomically(path, f'{{\n  "jax": {json.dumps(jax.__version__)},\n  "kernels": {{\n{lines}\n  }}\n}}\n')


def figures(results: Sequence[Compilation], failures: Sequence[str]) -> dict[str, Figure]:
    """Totals, and the three numbers of every kernel as `op.case.target.kernel.number`."""
    kernels = [kernel for result in results for kernel in result.kernels]
    total: dict[str, Figure] = {
        "compilations": len(results),
        "kernels": len(kernels),
        "failures": len(failures),
        "spilling_kernels": sum(kernel.spill_bytes > 0 for kernel in kernels),
        "registers_max": max((kernel.registers for kernel in kernels), default=None),
        "shared_bytes_max": max((kernel.shared_bytes for kernel in kernels), default=None),
    }
    for result in results:
        for name, entry in result.entries().items():
            total |= {f"{name}.{key}": value for key, value in entry.items()}
    return total


def table(results: Sequence[Compilation]) -> Table:
    """One row for each kernel."""
    # Eighty columns are what a log has.
    view = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("op", "case", "head\nwidth", "dtype", "architecture", "registers", "spills", "shared\nmemory"):
        numeric = heading in ("head\nwidth", "registers", "spills", "shared\nmemory")
        view.add_column(heading, justify="right" if numeric else "left", no_wrap=True)
    for result in results:
        route = result.case.removesuffix(f"-d{result.head_dim}-{result.dtype}")
        left = [result.op, route, str(result.head_dim), result.dtype, result.target]
        if result.error:
            view.add_row(*left, "-", "-", "fails", style="red")
        for kernel in result.kernels:
            # An op of several kernels has a row for each.
            several = f" ({kernel.name})" if len(result.kernels) > 1 else ""
            view.add_row(
                result.op + several,
                *left[1:],
                str(kernel.registers),
                f"{kernel.spill_bytes:,}",
                f"{kernel.shared_bytes:,}",
                style="red" if kernel.spill_bytes else None,
            )
    return view
