"""The numeric gate: every kernel, interpreted, against a float32 reference on every route, width and partition."""

import dataclasses
import functools
import importlib
import zlib

import jax
import jax.numpy as jnp
import pytest

from jaxkv.evaluation.kernel_cases import KernelCase, cases
from jaxkv.evaluation.kernel_references import relative_error
from jaxkv.pallas import mixed_attention as kernel
from jaxkv.pallas.mixed_attention import mixed_attention_triton

op = importlib.import_module("jaxkv.ops.mixed_attention")

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


def named(name: str) -> KernelCase:
    return next(case for case in CASES if case.op == "mixed_attention" and case.name == name)


def test_a_wrong_scale_fails_the_gate(monkeypatch):
    whole = kernel._kernel
    wrong = lambda *refs, parts, tile: whole(*refs, parts=parts, tile=tile._replace(scale=1.05 * tile.scale))  # noqa: E731
    case = named("gqa4-d64-float32-all-plain")
    assert error(case, "triton_interpret") < case.tolerance
    monkeypatch.setattr(kernel, "_kernel", wrong)
    assert error(case, "triton_interpret") > case.tolerance


def test_a_missing_window_mask_fails_the_gate(monkeypatch):
    whole = kernel._kernel
    wrong = lambda *refs, parts, tile: whole(*refs, parts=parts, tile=tile._replace(window=None))  # noqa: E731
    monkeypatch.setattr(kernel, "_kernel", wrong)
    case = named("gqa4-d64-float32-all-window")
    assert error(case, "triton_interpret") > case.tolerance


@pytest.mark.parametrize("partition", ["high", "low", "recent"])
def test_a_missing_mask_of_empty_slots_fails_the_gate(monkeypatch, partition):
    def wrong(q, layer, *others, **options):
        part = getattr(layer, partition)
        filled = dataclasses.replace(part, position=jnp.maximum(part.position, 0))
        return mixed_attention_triton(q, dataclasses.replace(layer, **{partition: filled}), *others, **options)

    monkeypatch.setattr(op, "mixed_attention_triton", wrong)
    case = named("gqa4-d64-float32-all-plain")
    assert error(case, "triton_interpret") > case.tolerance


def test_wrong_int4_scales_fail_the_gate(monkeypatch):
    def wrong(q, layer, *others, **options):
        low = dataclasses.replace(layer.low, v_scale=jnp.ones_like(layer.low.v_scale))
        return mixed_attention_triton(q, dataclasses.replace(layer, low=low), *others, **options)

    monkeypatch.setattr(op, "mixed_attention_triton", wrong)
    case = named("gqa4-d64-float32-all-plain")
    assert error(case, "triton_interpret") > case.tolerance
