"""The numeric gate: every kernel, interpreted, against a float32 reference on every route, width and partition."""

import functools
import zlib

import jax
import pytest

from jaxkv.evaluation.kernel_cases import KernelCase, cases
from jaxkv.evaluation.kernel_references import relative_error

CASES = cases()
SAMPLE = 11  # one case in so many runs by default; the mark `exhaustive` has the rest


def parameters():
    return [
        pytest.param(case, id=f"{case.op}-{case.name}", marks=[pytest.mark.exhaustive] if index % SAMPLE else [])
        for index, case in enumerate(CASES)
    ]


def error(case: KernelCase, implementation: str) -> float:
    operands = case.operands(zlib.crc32(case.name.encode()))
    found = jax.jit(functools.partial(case.call, implementation))(*operands)
    return relative_error(found, jax.jit(case.reference)(*operands))


@pytest.mark.parametrize("case", parameters())
def test_kernel_equals_float32_reference(case):
    assert error(case, "triton_interpret") < case.tolerance
