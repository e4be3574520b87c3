"""scripts/compare_torch.py on a tiny random model: its figures, and its exit codes."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "compare_torch.py"


@pytest.fixture(scope="module")
def script():
    specification = importlib.util.spec_from_file_location("script_compare_torch", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def test_tiny_model_equals_transformers(script, save_llama, monkeypatch, capsys):
    folder, torch_model = save_llama(max_position_embeddings=4096, initializer_range=0.1)
    with torch.no_grad():  # the engine never generates tokens that stand for nothing; transformers would
        torch_model.lm_head.weight[256:] = 0
    torch_model.save_pretrained(folder)
    monkeypatch.setattr(script, "BATCHES", (2,))
    options = ["--prompts", "1", "--max-new-tokens", "6", "--forced-tokens", "4", "--rounds", "1", "--threads", "0"]
    checks = ["max_logit_difference <= 1e-4", "greedy_match == 1", "decode_speed_ratio_b2 > 1e9"]
    arguments = ["--model", str(folder), "--json", "-", *options]
    code = script.cli(arguments + [word for check in checks for word in ("--check", check)])
    out, error = capsys.readouterr()
    figures = json.loads(out)
    assert list(figures) == script.figure_names(3)
    assert figures["greedy_match"] == 1
    assert 0 < figures["max_logit_difference"] < 1e-4
    assert figures["layer_0.hidden_difference"] == 0
    assert 0 < figures["max_relative_hidden_difference"] < 1e-5
    ratio = figures["transformers_decode_ms_b2"] / figures["decode_ms_b2"]
    assert figures["decode_speed_ratio_b2"] == pytest.approx(ratio)
    assert code == 1
    assert error.splitlines()[-1].startswith("check failed: decode_speed_ratio_b2 = ")


def test_wrong_weights_are_noticed(script, save_llama, monkeypatch, capsys):
    """The same run with one layer's weights changed on one side."""
    import jaxkv.models.loading as loading

    folder, _ = save_llama(max_position_embeddings=4096, initializer_range=0.1)

    def changed(*arguments, **options):
        model = real(*arguments, **options)
        model.params["layer_1"]["mlp"]["up"]["weight"] *= 1.01
        return model

    real = loading.load_model
    monkeypatch.setattr("jaxkv.models.load_model", changed)
    monkeypatch.setattr(script, "BATCHES", ())
    options = ["--prompts", "1", "--max-new-tokens", "6", "--forced-tokens", "4", "--threads", "0"]
    assert script.cli(["--model", str(folder), *options, "--check", "max_logit_difference <= 1e-4"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("check failed: max_logit_difference = ")
    hidden = [float(line.split(" = ")[1]) for line in out.splitlines() if line.startswith("layer_1.")]
    assert hidden[0] < 1e-5
    after = [float(line.split(" = ")[1]) for line in out.splitlines() if line.startswith("layer_2.")]
    assert after[0] > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompts", "0"], "--prompts 0 is below 1"),
        (["--check", "greedy_match"], "not of the form"),
        (["--category", "simple_cobol"], "simple_cobol"),
        (["--model", "nowhere"], "neither a folder nor a known model"),
    ],
)
def test_bad_input_is_one_line(script, capsys, options, message):
    assert script.cli(["--threads", "0", *options]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert message in error
    assert error.count("\n") == 1


def test_unknown_figure_is_refused_before_transformers_loads(script, save_llama, monkeypatch, capsys):
    folder, _ = save_llama()
    monkeypatch.setattr("jaxkv.evaluation.torch_reference.load_reference", lambda *_: pytest.fail("loaded"))
    assert script.cli(["--threads", "0", "--model", str(folder), "--check", "layer_9.hidden_difference < 1"]) == 2
    assert "no figure is named 'layer_9.hidden_difference'" in capsys.readouterr().err
