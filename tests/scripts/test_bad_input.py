"""Scripts refuse a bad input in one line, with exit code 2, before a model is loaded."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TOOL = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
MESSAGES = [{"role": "user", "content": "hello"}]


def load_script(name):
    specification = importlib.util.spec_from_file_location(f"script_{name}", ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def refusal(monkeypatch, capsys, tmp_path):
    """Runs a script in this process; the one line that it prints on being refused."""

    def no_model(*_, **__):
        raise AssertionError("a model was loaded before the input was checked")

    def run(script, *arguments):
        import jaxkv.models.loading

        monkeypatch.setattr(jaxkv.models.loading, "load_model", no_model)
        code = load_script(script).cli([str(argument) for argument in arguments])
        return one_line(code, *capsys.readouterr())

    return run


def one_line(code, out, error):
    assert code == 2, error
    assert out == ""
    assert error.startswith("error: ")
    assert error.count("\n") == 1, error
    return error


def write(folder, name, content):
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("tools", "messages", "options", "expected"),
    [
        ('[{"name": "f",\n  "parameters" {}}]', MESSAGES, [], ["tools.json", "line 2, column 16", "':' delimiter"]),
        ("", MESSAGES, [], ["tools.json", "line 1, column 1"]),
        (b'["\xff"]', MESSAGES, [], ["tools.json", "not UTF-8 at byte 2"]),
        (None, MESSAGES, [], ["cannot read the tools file", "No such file"]),
        ([], MESSAGES, [], ["tool"]),
        ({"name": "f"}, MESSAGES, [], ["tools"]),
        ([TOOL | {"parameters": {"type": "object", "properties": {"a": {"type": "strin"}}}}], MESSAGES, [], ["a.type"]),
        ([TOOL], "[{", [], ["messages.json", "line 1, column 3"]),
        ([TOOL], [], [], ["no list of messages"]),
        ([TOOL], [{"role": "user"}], [], ["message 0 of conversation 0", "content"]),
        ([TOOL], [MESSAGES, [{"role": "robot", "content": "x"}]], [], ["message 0 of conversation 1", "robot"]),
        ([TOOL], [MESSAGES, []], [], ["conversation 1"]),
        ([TOOL], [{"role": "system", "content": "x"}], [], ["role 'user'"]),
        ([TOOL], MESSAGES, ["--policy", "nothing"], ["unknown policy 'nothing'", "structural-prior"]),
        ([TOOL], MESSAGES, ["--policy", "nothing.json"], ["nothing.json"]),
        ([TOOL], MESSAGES, ["--batch", "0"], ["--batch 0"]),
        ([TOOL], MESSAGES, ["--max-new-tokens", "0"], ["--max-new-tokens 0"]),
        ([TOOL], MESSAGES, ["--temperature", "-1"], ["--temperature -1"]),
        ([TOOL], MESSAGES, ["--temperature", "nan"], ["--temperature nan"]),
        ([TOOL], MESSAGES, ["--top-p", "0"], ["--top-p 0"]),
    ],
)
def test_generate_refuses(refusal, tmp_path, tools, messages, options, expected):
    tools_path = tmp_path / "tools.json" if tools is None else write(tmp_path, "tools.json", tools)
    messages_path = write(tmp_path, "messages.json", messages)
    message = refusal("generate", "--tools", tools_path, "--messages", messages_path, *options)
    for part in expected:
        assert part in message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--categories", "simple_java"], ["simple_java", "simple_python"]),
        (["--categories", "multiple,nope"], ["'nope'"]),
        (["--limit", "0"], ["limit 0"]),
        (["--stride", "0"], ["stride 0"]),
        (["--batch", "0"], ["--batch 0"]),
        (["--policy", "full,nothing"], ["unknown policy 'nothing'"]),
        (["--policy", "all_high", "--compare-torch"], ["--compare-torch", "full"]),
        (["--check", "full.correct > = 3"], ["full.correct > = 3"]),
        (["--check", "full.corect >= 3"], ["full.corect", "full.correct"]),
        (["--grammar-coverage", "--check", "full.correct >= 3"], ["full.correct", "simple_python.gold_accepted"]),
    ],
)
def test_evaluate_refuses(refusal, tmp_path, options, expected):
    message = refusal("evaluate", "bfcl", "--out", tmp_path / "runs", *options)
    for part in expected:
        assert part in message
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--data", "nowhere"], ["nowhere is no folder"]),
        (["--data", "tests"], ["neither a *_databases folder"]),
        (["--data", "tests", "--stride", "0"], ["stride 0"]),
        (["--data", "tests", "--batch", "0"], ["--batch 0"]),
        (["--data", "tests", "--policy", "structural-prior"], ["'structural-prior'", "all_high_sql"]),
    ],
)
def test_evaluate_sql_refuses(refusal, tmp_path, options, expected):
    message = refusal("evaluate", "sql", "--out", tmp_path / "runs", *options)
    for part in expected:
        assert part in message
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [
        ("generate.py", ["--tools", "nowhere.json", "--messages", "examples/messages.json"], "nowhere.json"),
        ("evaluate.py", ["bfcl", "--categories", "nope"], "'nope'"),
    ],
)
def test_the_process_exits_with_code_two(script, arguments, expected):
    command = [sys.executable, ROOT / "scripts" / script, *arguments]
    process = subprocess.run(command, capture_output=True, text=True, env=os.environ, cwd=ROOT, check=False)
    assert expected in one_line(process.returncode, process.stdout, process.stderr)


@pytest.mark.parametrize(
    ("script", "options", "expected"),
    [
        ("benchmark_kernels", (), "no GPU here, only cpu; --cpu measures"),
        ("benchmark_kernels", ("--memory", "gpt-5"), "--memory gpt-5 is unknown; choose one of qwen3-4b"),
        ("benchmark_kernels", ("--memory", "qwen3-4b", "--rows", "0"), "--rows 0 is below 1"),
        ("benchmark_kernels", ("--cpu", "--target", "sm_90"), "--target sm_90 is for --memory"),
        ("benchmark_kernels", ("--cpu", "--check", "speed"), "is not of the form"),
        ("benchmark_kernels", ("--memory", "smollm2-135m", "--target", "sm_1"), "no target is named 'sm_1'"),
        ("tune_kernels", (), "no GPU here, only cpu; block sizes are measured"),
        ("tune_kernels", ("--ops", "softmax"), "--ops softmax is unknown; choose from mixed_attention"),
        ("tune_kernels", ("--head-dims", "64,72"), "--head-dims 72 is not one of 64, 80"),
        ("tune_kernels", ("--head-dims", "wide"), "--head-dims wide is not a list of numbers"),
    ],
)
def test_kernel_scripts_refuse(refusal, script, options, expected):
    assert expected in refusal(script, *options)
