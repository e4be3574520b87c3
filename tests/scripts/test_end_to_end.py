"""The scripts with the real model, from files to figures."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_bad_input import ROOT, load_script

pytestmark = pytest.mark.model

EXPECTED = [
    {
        "name": "search_flights",
        "arguments": {
            "origin": "Berlin",
            "destination": "Lisbon",
            "date": "2026-05-14",
            "cabin": "economy",
            "passengers": {"adults": 2, "children": 1},
        },
    }
]


def test_the_demo_answers_rightly_and_reports(tmp_path, capsys):
    code = load_script("generate").cli(
        [
            *("--tools", str(ROOT / "examples/tools.json"), "--messages", str(ROOT / "examples/messages.json")),
            *("--policy", "structural-prior", "--html", str(tmp_path / "run.html")),
            *("--run-json", str(tmp_path / "run.json"), "--profile", "--stream"),
        ]
    )
    out = capsys.readouterr().out
    assert code == 0
    assert json.loads(out.splitlines()[-1]) == EXPECTED
    assert out.startswith(json.dumps(EXPECTED[0]))  # streamed
    assert "decode step, " in out
    assert "uncalibrated policy" in out
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "uncalibrated policy" in page
    assert "<b>Functions</b>" in page  # the prompt's text, not its ids
    assert "schema_bearing / dispatch_key / critical" in page
    record = json.loads((tmp_path / "run.json").read_text())
    assert 0.4 < record["figures"]["ratio_total"] < 0.7
    assert record["config"]["policy"] == "structural-prior"


def test_an_evaluation_measures_resumes_and_checks(tmp_path, capsys, monkeypatch):
    arguments = [
        *("bfcl", "--categories", "simple_python", "--limit", "2", "--policy", "full,all_high", "--batch", "2"),
        *("--max-new-tokens", "24", "--out", str(tmp_path), "--json", "-"),
        *("--check", "full.correct >= 0", "--check", "all_high.same_tokens_as_full == 1"),
    ]
    script = load_script("evaluate")
    assert script.cli(arguments) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["full.total"] == 2
    assert first["full.ratio_total"] == 1
    assert first["full.allocated_bytes"] > 0
    journal = (tmp_path / "full.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in journal[1:]] != []

    import jaxkv.engine

    def nothing_to_run(engine, requests, on_token=None):
        assert list(requests) == []
        yield from ()

    monkeypatch.setattr(jaxkv.engine.Engine, "run", nothing_to_run)
    assert script.cli([*arguments, "--check", "full.correct >= 3"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out) == first
    assert captured.err.splitlines()[-1].startswith(f"check failed: full.correct = {first['full.correct']}")

    assert script.cli([*arguments, "--max-new-tokens", "25"]) == 2
    assert "max_new_tokens: 24 there, 25 here" in capsys.readouterr().err
