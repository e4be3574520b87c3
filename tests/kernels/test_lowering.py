"""The lowering gate: every kernel lowers for every GPU, nothing but kernels does, and the automatic choice is right."""

import ast
import functools
from pathlib import Path

import jax.numpy as jnp
import probes
import pytest

import jaxkv
from jaxkv.errors import KernelError
from jaxkv.evaluation.kernel_cases import LARGE, PLAIN, ROUTES, KernelCase, cases, mixed_attention_case
from jaxkv.pallas.configs import load_config, splits_for
from jaxkv.pallas.gates import kernels_in, lower_for, triton_calls

GPUS = ("sm_80", "sm_89", "sm_90", "gfx942")
CASES = cases()
SAMPLE = 61  # one case in so many runs by default; the mark `exhaustive` has the rest
# One case of each op for what does not depend on routes and widths.
OPS = {case.op: case for case in reversed(CASES)}


def sampled(*targets):
    found = []
    for index, case in enumerate(CASES):
        for offset, target in enumerate(targets):
            # Other cases for each target: together they cover more routes and widths.
            marks = [] if (index + 7 * offset) % SAMPLE == 0 else [pytest.mark.exhaustive]
            found.append(pytest.param(case, target, id=f"{case.op}-{case.name}-{target}", marks=marks))
    return found


def lowered(case: KernelCase, implementation: str | None, target: str) -> str:
    return lower_for(functools.partial(case.call, implementation), case.abstract(), target)


@pytest.mark.parametrize(("case", "target"), sampled(*GPUS))
def test_kernel_lowers_for_gpu(case, target):
    text = lowered(case, "triton", target)
    assert f"jaxkv_{case.op}" in kernels_in(text)
    assert triton_calls(text) >= 1


@pytest.mark.parametrize(("case", "target"), sampled("tpu", "sm_80"))
def test_xla_implementation_lowers_without_kernels(case, target):
    text = lowered(case, "xla", target)
    assert not kernels_in(text)
    assert not triton_calls(text)


@pytest.mark.parametrize("op", OPS)
def test_automatic_choice_follows_target(op):
    for target in GPUS:
        assert f"jaxkv_{op}" in kernels_in(lowered(OPS[op], None, target)), target
    for target in ("cpu", "tpu"):
        text = lowered(OPS[op], None, target)
        assert not kernels_in(text), target
        assert not triton_calls(text), target


@pytest.mark.parametrize("target", GPUS)
def test_block_sizes_are_those_of_target(target):
    """Not those of the machine: the grid splits a cache as the target's config says."""
    route = next(route for route in ROUTES if route.name == "gqa4")
    case = mixed_attention_case(route, 128, "bfloat16", "all", PLAIN, LARGE)
    config = load_config("mixed_attention", 128, on=target)
    rows, kv_heads = LARGE.rows, route.kv_heads
    splits = splits_for(config, programs=rows * kv_heads, slots=max(LARGE.high, LARGE.low))
    text = lowered(case, "triton", target)
    assert f"grid_x = {rows * kv_heads} : i32, grid_y = {splits} : i32" in text
    assert f"num_warps = {config.num_warps} : i32" in text


def test_primitive_that_triton_lacks_is_refused():
    with pytest.raises(NotImplementedError, match="sort"):
        lower_for(probes.launched(probes.sorting), probes.OPERANDS, "sm_80")


def test_lowering_accepts_what_the_compiler_refuses():
    """A choice between the constants 1 and 0 lowers to a boolean loop bound, on which the compiler then fails.

    `test_compile_report` has the same kernel fail. If this test fails, JAX has learnt to refuse it: good.
    """
    text = lower_for(probes.launched(probes.boolean_bound), probes.OPERANDS, "sm_80")
    assert kernels_in(text) == {"jaxkv_probe"}


def test_unknown_target_is_refused():
    with pytest.raises(KernelError, match="no target is named 'sm_70'; choose one of sm_80"):
        lower_for(jnp.sin, (jnp.ones(3),), "sm_70")


def test_one_module_imports_pallas_triton():
    """A backend that JAX deprecates must be replaceable in one place."""
    package = Path(jaxkv.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any("pallas.triton" in name for name in imported(path))
    }
    assert found == {"pallas/triton.py"}


def imported(path: Path) -> set[str]:
    """Full names of what a module of JAX's or others' imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("jaxkv"):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names
