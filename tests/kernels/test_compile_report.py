"""The compile gate: what it measures is right, and everything that it is there for makes it fail.

Tests marked `aot` compile for CUDA without a GPU; `make aot` runs them in an environment that has the plugin.
"""

import dataclasses
import functools
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import probes
import pytest

from jaxkv.errors import KernelError
from jaxkv.evaluation.kernel_compile import (
    Compilation,
    compile_cases,
    compiled_cases,
    figures,
    read_baseline,
    regressions,
    scope,
    select,
    table,
    write_baseline,
)
from jaxkv.pallas.gates import CompiledKernel, compile_for, parse_ptxas, require_plugin
from jaxkv.pallas.targets import COMPILED, TARGETS

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "compile_kernels.py"
BASELINE = ROOT / "tests" / "kernels" / "compile_baseline.json"


@pytest.fixture(scope="module")
def plugin():
    """Skips a test where nothing can be compiled for CUDA."""
    try:
        require_plugin()
    except KernelError as error:
        pytest.skip(str(error))


def aot(test):
    return pytest.mark.aot(pytest.mark.usefixtures("plugin")(test))


def result(registers=128, spill_bytes=0, shared_bytes=8192, case="gqa4-d64-bfloat16", target="sm_80", **fields):
    kernel = CompiledKernel("jaxkv_mixed_attention", registers, spill_bytes, shared_bytes)
    return dataclasses.replace(Compilation("mixed_attention", case, 64, "bfloat16", target, (kernel,)), **fields)


NAME = "mixed_attention.gqa4-d64-bfloat16.sm_80.jaxkv_mixed_attention"


def test_what_equals_or_betters_the_baseline_passes():
    known = result().entries()
    assert regressions([result()], known) == []
    assert regressions([result(registers=100, shared_bytes=0)], known) == []
    assert regressions([result(registers=136, shared_bytes=8192 + 1024)], known) == []


@pytest.mark.parametrize(
    ("worse", "words"),
    [
        ({"registers": 137}, "137 registers, the baseline has 128 and 8 more are allowed"),
        ({"shared_bytes": 9217}, "9,217 bytes of shared memory, the baseline has 8,192 and 1,024 more are allowed"),
        ({"spill_bytes": 4}, "spills 4 bytes a thread and 0 is the limit"),
    ],
)
def test_a_worse_kernel_fails_and_is_named(worse, words):
    (failure,) = regressions([result(**worse)], result().entries())
    assert failure.startswith(f"{NAME}: {words}")


def test_a_spill_fails_even_if_the_baseline_has_it():
    spilling = result(spill_bytes=8)
    assert len(regressions([spilling], spilling.entries())) == 1


def test_a_kernel_that_the_baseline_lacks_fails():
    (failure,) = regressions([result()], {})
    assert failure == f"{NAME}: is not in the baseline; refresh it with --write-baseline if that is meant"


def test_a_stale_entry_fails_unless_it_was_not_compiled():
    stale = result(case="gone-d64-bfloat16").entries()
    known = result().entries() | stale
    (failure,) = regressions([result()], known)
    assert failure.startswith(f"{next(iter(stale))}: is in the baseline and not among the compiled kernels")
    assert not regressions([result()], known, scope(["mixed_attention.gqa4-*"], ["sm_80"]))
    assert regressions([result()], known, scope(["mixed_attention.*-d64-*"], []))


def test_a_case_that_does_not_compile_fails_once():
    broken = result(kernels=(), error="sm_80: the compiler refuses it: no")
    assert regressions([broken], result().entries()) == [
        "mixed_attention.gqa4-d64-bfloat16.sm_80: sm_80: the compiler refuses it: no"
    ]


def test_a_baseline_is_read_as_written_and_refused_when_it_does_not_fit(tmp_path):
    path = tmp_path / "baseline.json"
    kept = result(case="chunk-d64-bfloat16").entries()
    write_baseline(path, [result(), result(target="sm_90")], kept)
    assert read_baseline(path) == result().entries() | result(target="sm_90").entries() | kept
    other = json.loads(path.read_text()) | {"jax": "0.1.0"}
    path.write_text(json.dumps(other))
    with pytest.raises(KernelError, match=r"was made with jax 0\.1\.0 and this is jax"):
        read_baseline(path)
    path.write_text(json.dumps({"jax": jax.__version__, "kernels": {"a.b.c.d": {"registers": 1}}}))
    with pytest.raises(KernelError, match="malformed entry"):
        read_baseline(path)
    with pytest.raises(KernelError, match="no readable compile baseline"):
        read_baseline(tmp_path / "absent.json")


def test_the_committed_baseline_has_exactly_the_compiled_cases():
    """Needs no plugin, so a case that is added without a baseline fails in every test run."""
    stored = {name.rsplit(".", 1)[0] for name in json.loads(BASELINE.read_text())["kernels"]}
    assert stored == {f"{name}.{target}" for name in compiled_cases() for target in COMPILED}


def test_the_committed_baseline_spills_nothing_and_fits_every_target():
    for name, entry in json.loads(BASELINE.read_text())["kernels"].items():
        gpu = TARGETS[name.split(".")[2]].gpu
        assert gpu is not None
        assert entry["spill_bytes"] == 0, name
        assert 0 < entry["registers"] <= 255, name
        assert entry["shared_bytes"] <= gpu.shared_per_block, name


def test_cases_are_selected_by_name_and_target():
    chosen = select(["mixed_attention.gqa2-d64-*"], ["sm_89"])
    assert [(name, target) for name, _, target in chosen] == [("mixed_attention.gqa2-d64-bfloat16", "sm_89")]
    assert len(select([], [])) == len(COMPILED) * len(compiled_cases())
    with pytest.raises(KernelError, match="no case matches nothing"):
        select(["nothing"], [])
    with pytest.raises(KernelError, match="cannot be compiled for 'gfx942' here; choose from sm_80"):
        select([], ["gfx942"])


def test_an_error_of_one_case_leaves_the_others_alone():
    def compiler(fn, operands, target):
        if target == "sm_80":
            raise NotImplementedError("sort")
        return (CompiledKernel("jaxkv_mixed_attention", 1, 0, 0),)

    chosen = select(["mixed_attention.gqa2-d64-*"], ["sm_80", "sm_90"])
    bad, good = compile_cases(chosen, compiler=compiler)
    assert bad.error == "does not lower: NotImplementedError: sort"
    assert good.kernels
    (none,) = compile_cases(chosen[1:], compiler=lambda *_: ())
    assert none.error == "no kernel was launched for implementation 'triton'"
    assert figures([bad, good], ["failure"])["failures"] == 1
    assert table([bad, good]).row_count == 2


def test_the_words_of_ptxas_are_read():
    report = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'jaxkv_a' for 'sm_89'
ptxas info    : Function properties for jaxkv_a
    10408 bytes stack frame, 29080 bytes spill stores, 28932 bytes spill loads
ptxas info    : Used 80 registers, used 1 barriers, 10408 bytes cumulative stack size, 368 bytes cmem[0]
ptxas info    : Compiling entry function 'jaxkv_b' for 'sm_89'
ptxas info    : Function properties for jaxkv_b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 32 bytes smem, 368 bytes cmem[0]
"""
    assert parse_ptxas(report) == {"jaxkv_a": (80, 58012, 0), "jaxkv_b": (168, 0, 32)}
    with pytest.raises(KernelError, match="nothing of the registers of jaxkv_a"):
        parse_ptxas("Compiling entry function 'jaxkv_a' for 'sm_89'\n")


@pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is not None
    and importlib.util.find_spec("jax_plugins.xla_cuda12") is not None,
    reason="the plugin is installed",
)
def test_a_missing_plugin_is_one_line_with_the_remedy():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: compiling for CUDA needs the package jax-cuda12-p")
    assert "install jaxkv[aot]" in done.stderr


@aot
@pytest.mark.parametrize("target", COMPILED)
def test_a_small_kernel_is_measured(target):
    (kernel,) = compile_for(probes.launched(probes.small), probes.OPERANDS, target)
    assert kernel.name == "jaxkv_probe"
    assert 0 < kernel.registers < 64
    assert (kernel.spill_bytes, kernel.shared_bytes) == (0, 0)


@aot
def test_shared_memory_of_a_product_is_measured():
    """Two tiles of 64 x 64 bfloat16 numbers pass through shared memory, at least one at a time."""
    (kernel,) = compile_for(probes.launched(probes.tile(64), num_warps=4), probes.OPERANDS, "sm_80")
    assert 64 * 64 * 2 <= kernel.shared_bytes <= 4 * 64 * 64 * 2


def failures_of(kernel, num_warps=1):
    """What the gate says when a case of the list launches this kernel."""
    ((name, case, target),) = select(["mixed_attention.gqa2-d64-*"], ["sm_89"])
    case = dataclasses.replace(
        case,
        make=lambda key: (jax.numpy.zeros(probes.OPERANDS[0].shape),),
        call=lambda implementation, x: probes.launched(kernel, num_warps)(x),
    )
    results = list(compile_cases([(name, case, target)]))
    return regressions(results, {entry: numbers for one in results for entry, numbers in one.entries().items()})


@aot
def test_a_kernel_that_spills_fails_the_gate_and_names_the_case():
    (failure,) = failures_of(probes.spilling)
    assert failure.startswith("mixed_attention.gqa2-d64-bfloat16.sm_89.jaxkv_probe: spills ")


@aot
def test_too_much_shared_memory_fails_the_gate_with_both_numbers():
    (failure,) = failures_of(probes.tile(256), num_warps=8)
    assert failure.startswith("mixed_attention.gqa2-d64-bfloat16.sm_89: ")
    assert "Shared memory size limit exceeded" in failure
    assert "available: 101376" in failure


@aot
def test_what_lowers_and_does_not_compile_fails_the_gate():
    (failure,) = failures_of(probes.boolean_bound)
    assert "sm_89: the compiler refuses it" in failure
    assert "'scf.for' op failed to verify" in failure


@aot
def test_what_does_not_lower_fails_the_gate():
    (failure,) = failures_of(probes.sorting)
    assert "does not lower: NotImplementedError: Unimplemented primitive in Pallas Triton lowering: sort" in failure


@aot
def test_an_accepted_kernel_passes_the_gate():
    assert failures_of(probes.small) == []


@aot
def test_the_script_compares_with_its_baseline(tmp_path):
    """Exit code 0 against its own numbers, 1 against smaller ones; figures alone on standard output."""
    baseline = tmp_path / "baseline.json"
    run = functools.partial(subprocess.run, capture_output=True, text=True, cwd=tmp_path)
    command = [sys.executable, str(SCRIPT), "--cases", "mixed_attention.gqa2-d64-*", "--targets", "sm_80"]
    command += ["--baseline", str(baseline)]
    done = run([*command, "--write-baseline"])
    assert done.returncode == 0, done.stderr
    stored = json.loads(baseline.read_text())
    (entry,) = stored["kernels"].values()
    done = run([*command, "--json", "-"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["registers_max"] == entry["registers"]
    entry["registers"] -= 9
    baseline.write_text(json.dumps(stored))
    done = run(command)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("gate failed: mixed_attention.gqa2-d64-bfloat16.sm_80.")
