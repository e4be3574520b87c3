"""What measures and checks kernels: the case list's references, the GPU check, benchmarks, tuning, decode memory."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.errors import KernelError
from jaxkv.evaluation import gpu_check, kernel_benchmark, kernel_tuning
from jaxkv.evaluation.decode_memory import SHAPES, decode_memory
from jaxkv.evaluation.kernel_benchmark import Shape, attention_bytes, benchmark
from jaxkv.evaluation.kernel_cases import cases
from jaxkv.evaluation.kernel_references import MASKED, plain_attention, relative_error
from jaxkv.ops.implementation import run
from jaxkv.pallas import configs
from jaxkv.pallas.configs import Config


def test_case_names_are_unique_and_cover_every_op():
    names = [(case.op, case.name) for case in cases()]
    assert len(set(names)) == len(names)
    assert {op for op, _ in names} == {"mixed_attention", "deletion_effect", "attention_mass", "quantize"}


def test_abstract_operands_are_those_of_the_random_ones():
    for case in cases()[::97]:
        real, abstract = case.operands(0), case.abstract()
        shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (real, abstract)]
        assert shapes[0] == shapes[1], case.name


def test_the_reference_is_attention_in_float64():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((1, 2, 4, 8)), rng.standard_normal((1, 2, 9, 8)), rng.standard_normal((1, 2, 9, 8))
    at = np.array([[0, 1, -1, 3, 4, 5, 9, 7, 2]])
    q_position, sinks = np.array([[5, -1]]), rng.standard_normal(4)
    to = lambda x, kind=jnp.float32: jnp.asarray(x, kind)  # noqa: E731
    out, lse = plain_attention(
        to(q), to(k), to(v), to(at, jnp.int32), to(q_position, jnp.int32), to(sinks), scale=0.3, window=4
    )
    for h in range(4):
        seen = [i for i in range(9) if 1 < at[0, i] <= 5]
        scores = np.append(k[0, h // 2, seen] @ q[0, 0, h] * 0.3, sinks[h])
        weights = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(out[0, 0, h], weights[:-1] @ v[0, h // 2, seen], rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(lse[0, 0, h], np.log(np.exp(scores).sum()), rtol=1e-5)
    nothing, lse = plain_attention(to(q), to(k), to(v), to(at, jnp.int32), to(q_position, jnp.int32), scale=0.3)
    assert (np.asarray(nothing)[0, 1] == 0).all()
    assert (np.asarray(lse)[0, 1] == MASKED).all()


def test_a_number_that_is_not_finite_is_an_infinite_error():
    good = (np.ones(3), np.array([1.0, MASKED]))
    assert relative_error(good, good) == 0
    assert relative_error((np.array([1, np.nan, 1]), good[1]), good) == np.inf
    assert relative_error((good[0], np.array([1.0, 2.0])), good) == np.inf
    assert relative_error((np.array([1, 1, 1.1]), good[1]), good) == pytest.approx(0.1 / 3**0.5)


def few(monkeypatch, change=lambda case: case):
    chosen = tuple(map(change, cases()[:1]))
    monkeypatch.setattr(gpu_check, "cases", lambda: chosen)
    return chosen[0]


def check(tmp_path, *options):
    path = tmp_path / "results.json"
    code = gpu_check.main(gpu_check.parser().parse_args(["--json", str(path), *options]))
    return code, json.loads(path.read_text())


def test_the_gpu_check_reports_errors_and_a_fresh_seed(monkeypatch, tmp_path):
    case = few(monkeypatch)
    code, results = check(tmp_path, "--implementation", "triton_interpret")
    assert code == 0
    assert (results["checked"], results["skipped"], results["failed"]) == (1, 0, [])
    assert 0 <= results[f"{case.op}.{case.dtype}.error"] < case.tolerance
    assert results["seed"] != check(tmp_path, "--implementation", "xla")[1]["seed"]


def test_the_gpu_check_fails_for_a_wrong_kernel_and_for_one_that_does_not_run(monkeypatch, tmp_path):
    def doubled(case):
        call = lambda implementation, *x: [2 * y for y in case.call(implementation, *x)]  # noqa: E731
        return dataclasses.replace(case, call=call)

    case = few(monkeypatch, doubled)
    code, results = check(tmp_path, "--implementation", "xla")
    assert code == 1
    assert results["failed"][0].startswith(f"{case.op} {case.name}: error 1.00e+00 against a limit of")
    few(monkeypatch)
    code, results = check(tmp_path, "--implementation", "cuda")
    assert code == 1
    assert "no implementation 'cuda'" in results["failed"][0]


def test_the_gpu_check_needs_a_gpu_and_time(monkeypatch, tmp_path):
    with pytest.raises(KernelError, match="need a GPU and JAX sees cpu"):
        check(tmp_path)
    few(monkeypatch)
    code, results = check(tmp_path, "--implementation", "xla", "--seconds", "0")
    assert code == 1, "nothing was checked"
    assert results["skipped"] == 1


def test_benchmark_counts_bytes_and_stops_in_time():
    shape = Shape("gpt-oss-20b", tokens=128, rows=2, ratio="0.33")
    high, low, heads, kv, d = 26, 64, 64, 8, 64
    row = kv * 2 * ((high + 17) * 2 * d + low * (d // 2 + 2)) + 4 * (high + low + 16) + 2 * heads * 2 * d
    assert attention_bytes(shape, "bfloat16") == 2 * row
    figures = {}
    for part in benchmark([shape], layers=1, seconds=60.0, dtype="float32"):
        figures |= part
    at = "mixed_attention.gpt-oss-20b.t128.b2.r0.33"
    assert figures[f"{at}.dense_ratio"] == pytest.approx(figures[f"{at}.dense_us"] / figures[f"{at}.us"])
    assert figures["copy_gb_per_s"] > 0
    for op in ("deletion_effect", "attention_mass", "quantize"):
        assert figures[f"{op}.gpt-oss-20b.t128.b2.us"] > 0
    assert len(list(benchmark([shape], layers=1, seconds=-1.0, dtype="float32"))) == 1, "only the bandwidth"


def test_benchmark_shapes_hold_what_the_papers_serve():
    shapes = kernel_benchmark.gpu_shapes()
    assert shapes[0] == Shape("qwen3-4b", 32_768, 8, "0.33")
    assert len(set(shapes)) == len(shapes) == 4 * 2 * 3 * 3


FAST, SLOW, NEAR = Config(64, 4, 2), Config(32, 4, 2), Config(128, 4, 2)


def test_tuning_takes_the_fastest_and_keeps_the_present_in_a_tie():
    times = {FAST: 1.0, NEAR: 1.01, SLOW: 2.0}
    assert kernel_tuning.best([SLOW, NEAR, FAST], times.__getitem__)[0] == FAST
    assert kernel_tuning.best([SLOW, FAST], times.__getitem__, present=NEAR)[0] == NEAR
    chosen, results = kernel_tuning.best([NEAR, FAST], times.__getitem__, present=SLOW)
    assert chosen == FAST
    assert results[SLOW] == 2.0


def test_tuning_goes_on_after_a_config_that_does_not_run():
    def seconds(config):
        if config == FAST:
            raise RuntimeError("RESOURCE_EXHAUSTED: shared memory\nmore")
        return 1.0

    chosen, results = kernel_tuning.best([FAST, SLOW], seconds)
    assert chosen == SLOW
    assert results[FAST] == "RuntimeError: RESOURCE_EXHAUSTED: shared memory"
    with pytest.raises(KernelError, match="none of 1 configurations runs here: RuntimeError: RESOURCE_EXHAUSTED"):
        kernel_tuning.best([FAST], seconds)


@pytest.mark.parametrize("op", kernel_tuning.OPS)
def test_tuned_tables_are_read_back(op, tmp_path, monkeypatch):
    table = kernel_tuning.retuned(op, "sm_90", {64: NEAR})
    assert table["sm_90"][64] == NEAR
    assert table["sm_90"][128] == configs.stored(op)["sm_90"][128]
    assert table["sm_80"] == configs.stored(op)["sm_80"]
    configs.write(op, table, tmp_path)
    monkeypatch.setattr(configs, "FOLDER", tmp_path)
    configs.stored.cache_clear()
    assert configs.stored(op) == table
    assert configs.load_config(op, 64, "sm_90") == NEAR
    monkeypatch.undo()
    configs.stored.cache_clear()
    assert list(kernel_tuning.candidates(op, 128, 132))


@pytest.mark.parametrize("op", kernel_tuning.OPS)
def test_stored_tables_are_written_as_they_are(op, tmp_path):
    configs.write(op, configs.stored(op), tmp_path)
    assert (tmp_path / f"{op}.json").read_text() == (configs.FOLDER / f"{op}.json").read_text()


def test_other_architectures_and_widths_take_their_nearest():
    table = configs.stored("mixed_attention")
    assert configs.load_config("mixed_attention", 64, "sm_86") == table["sm_80"][64]
    assert configs.load_config("mixed_attention", 64, "sm_120") == table["sm_90"][64]
    assert configs.load_config("mixed_attention", 64, "sm_75") == table["sm_80"][64]
    assert configs.load_config("mixed_attention", 64, "gfx90a") == table["gfx942"][64]
    assert configs.load_config("mixed_attention", 64, "xe") == table["sm_90"][64]
    assert configs.load_config("mixed_attention", 72, "sm_80") == table["sm_80"][80]
    assert configs.load_config("mixed_attention", 250, "sm_80") == table["sm_80"][256]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_slots": 48}, "block_slots = 48; it is a power of two"),
        ({"block_slots": 8}, "block_slots = 8"),
        ({"query_rows": 24}, "query_rows = 24"),
        ({"num_warps": 3}, "num_warps is 1, 2, 4, 8 or 16"),
    ],
)
def test_impossible_configs_are_errors(fields, message):
    with pytest.raises(KernelError, match=message):
        Config(**({"block_slots": 64, "num_warps": 4, "num_stages": 2} | fields))


def test_decode_memory_of_an_abstract_model():
    config = dataclasses.replace(SHAPES["smollm2-135m"], num_layers=3)
    memory = decode_memory(config, rows=2, tokens=2048, high=0.2, low=0.5)
    assert memory["all_state_aliased"] is True
    assert memory["temporaries_over_state"] < 1
    assert memory["payload_ratio"] == pytest.approx(0.2 + 0.5 * (4 * 64 + 16) / (16 * 64))
    assert memory["full_bytes"] == 2 * 2048 * 2 * 3 * 3 * 64 * 4
    assert 0.329 < memory["bfloat16_state_over_full"] < 0.4


def test_a_named_implementation_is_what_runs():
    xla, triton = (lambda x: "xla"), (lambda x, interpret=False: ("triton", interpret))
    assert run("op", None, xla, triton, None, 1) == "xla"
    assert run("op", "xla", xla, triton, None, 1) == "xla"
    assert run("op", "triton_interpret", xla, triton, None, 1) == ("triton", True)
    with pytest.raises(KernelError, match="needs an NVIDIA or AMD GPU and this is cpu"):
        run("op", "triton", xla, triton, None, 1)
    with pytest.raises(KernelError, match="cannot run: head width 7"):
        run("op", "triton_interpret", xla, triton, "head width 7 is outside", 1)
