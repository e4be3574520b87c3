"""What only a GPU can show: every kernel's numbers as compiled, and its speed. Run by `scripts/gpu_check.sh`.

Needs JAX, NumPy, jaxtyping and rich; no network, no model, nothing that is compiled beforehand.
"""

import argparse
import functools
import os
import secrets
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import jax

from jaxkv.errors import KernelError
from jaxkv.evaluation.figures import finish, output_console, parse_checks, run_script
from jaxkv.evaluation.kernel_benchmark import benchmark, gpu_shapes
from jaxkv.evaluation.kernel_cases import KernelCase, cases
from jaxkv.evaluation.kernel_references import relative_error

STRIDE: Final = 11  # coprime with the lengths of the matrix's axes: a run that stops early has seen all of them
RESERVE: Final = 0.45  # share of the time that the benchmark has at least


def check_case(case: KernelCase, implementation: str, seed: int) -> float:
    """The error of one case, compiled and run here."""
    operands = case.operands(seed)
    found = jax.jit(functools.partial(case.call, implementation))(*operands)
    return relative_error(found, jax.jit(case.reference)(*operands))


def check_cases(
    chosen: Sequence[KernelCase], implementation: str, seed: int, seconds: float, workers: int
) -> dict[str, Any]:
    """Errors of all cases that can be started in `seconds`; compilation is spread over threads.

    Returns:
      checked and skipped (counts), failed (a list of `op name: reason`), and `<op>.<dtype>.error`, the largest.
    """
    began = time.perf_counter()

    def one(case: KernelCase) -> tuple[KernelCase, float | str | None]:
        if time.perf_counter() - began > seconds:
            return case, None
        try:
            return case, check_case(case, implementation, seed)
        except Exception as error:  # one kernel that does not compile must not hide the others
            return case, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"

    ordered = [chosen[i] for start in range(STRIDE) for i in range(start, len(chosen), STRIDE)]
    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(one, ordered))
    failed: list[str] = []
    worst: dict[str, float] = {}
    for case, error in results:
        name = f"{case.op} {case.name}"
        if isinstance(error, str):
            failed.append(f"{name}: {error}")
        elif error is not None:
            key = f"{case.op}.{case.dtype}.error"
            worst[key] = max(worst.get(key, 0.0), error)
            if not error < case.tolerance:
                failed.append(f"{name}: error {error:.2e} against a limit of {case.tolerance:.0e}")
    skipped = sum(error is None for _, error in results)
    return {"checked": len(results) - skipped, "skipped": skipped, "failed": failed, **worst}


def main(arguments: argparse.Namespace) -> int:
    device = jax.devices()[0]
    if device.platform != "gpu" and arguments.implementation == "triton":
        raise KernelError(
            f"the kernels need a GPU and JAX sees {device.platform}; run this where `jax.devices()` lists one"
        )
    checks = parse_checks(arguments.check)
    began = time.perf_counter()
    seed = arguments.seed if arguments.seed is not None else secrets.randbits(31)
    chosen = cases()[:: arguments.every]
    figures: dict[str, Any] = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "seed": seed,
    }
    figures |= check_cases(
        chosen, arguments.implementation, seed, arguments.seconds * (1 - RESERVE), os.cpu_count() or 1
    )
    console = output_console(arguments.json)
    console.print(f"{figures['checked']} cases checked, {len(figures['failed'])} failed, {figures['skipped']} skipped")
    for failure in figures["failed"]:
        console.print(f"failed: {failure}", markup=False, soft_wrap=True)
    if device.platform == "gpu":
        left = arguments.seconds - (time.perf_counter() - began)
        for part in benchmark(gpu_shapes(), layers=8, seconds=left, dtype="bfloat16"):
            figures |= part
            console.print("  ".join(f"{name} = {value}" for name, value in part.items()), soft_wrap=True)
    figures["seconds"] = time.perf_counter() - began
    code = finish(figures, arguments.json, checks)
    return 1 if figures["failed"] or not figures["checked"] else code


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument(
        "--json", metavar="FILE", default="gpu_check.json", help="where the results go; - is standard output"
    )
    made.add_argument("--seconds", type=float, default=420, help="time for everything")
    made.add_argument("--seed", type=int, help="of the random inputs; fresh by default")
    made.add_argument("--every", type=int, default=1, help="take every so many-th case only")
    made.add_argument("--implementation", default="triton", help="triton, or triton_interpret where there is no GPU")
    made.add_argument(
        "--check", action="append", default=[], metavar="EXPRESSION", help="a bound on a figure; repeatable"
    )
    return made


if __name__ == "__main__":
    sys.exit(run_script(lambda: main(parser().parse_args())))
