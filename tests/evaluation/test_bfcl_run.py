"""Figures from finished cases, and that an interrupted evaluation goes on to the figures of an uninterrupted one."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

import jaxkv.engine
from jaxkv.evaluation import bfcl_run
from jaxkv.evaluation.bfcl import gold_calls, load
from jaxkv.evaluation.bfcl_run import figure_names, figures, policy_identity, run_policy
from jaxkv.evaluation.journal import Journal
from jaxkv.policies.registry import load_policy
from jaxkv.state.payload import Cost

CASES = load("simple_python", limit=4) + load("multiple", limit=2)
COST = Cost(prefill=30, prefill_full=100, decode=20, decode_full=60, live=7, live_full=10, allocated_bytes=8)

CALIBRATED = {"full": True, "pask": False}


def record(case, correct, token_ids, cost=COST):
    return {
        "id": case.id,
        "category": case.category,
        "correct": correct,
        "token_ids": token_ids,
        "cost": None if cost is None else dataclasses.asdict(cost),
    }


def test_figures_are_ratios_of_sums_and_come_for_each_category():
    double = Cost(prefill=60, prefill_full=100, decode=0, decode_full=0, live=1, live_full=90, allocated_bytes=5)
    full = {case.id: record(case, i != 0, [1, i]) for i, case in enumerate(CASES)}
    pask = {case.id: record(case, i < 3, [1, 0] if i == 0 else [2, i]) for i, case in enumerate(CASES)}
    pask[CASES[0].id]["cost"] = dataclasses.asdict(double)
    torch = {case.id: record(case, True, [1, i] if i < 5 else [9], None) for i, case in enumerate(CASES)}
    found = figures(
        {"full": full, "pask": pask, "transformers": torch}, CASES, ["simple_python", "multiple"], CALIBRATED
    )
    assert (found["full.calibrated"], found["pask.calibrated"]) == (True, False)
    assert (found["full.correct"], found["full.total"], found["full.accuracy"]) == (5, 6, 5 / 6)
    assert (found["pask.correct"], found["pask.simple_python.correct"], found["pask.multiple.correct"]) == (3, 3, 0)
    assert found["pask.ratio_total"] == (60 + 5 * 50) / (100 + 5 * 160)
    assert found["pask.ratio_prefill"] == (60 + 5 * 30) / 600
    assert found["pask.ratio_decode"] == 100 / 300
    assert found["pask.ratio_live"] == 36 / 140
    assert found["pask.multiple.ratio_total"] == 50 / 160
    assert found["pask.allocated_bytes"] == 8
    assert found["pask.same_tokens_as_full"] == 1 / 6
    assert found["pask.simple_python.same_tokens_as_full"] == 1 / 4
    assert found["full.same_tokens_as_transformers"] == 5
    assert found["full.multiple.same_tokens_as_transformers"] == 1
    assert found["transformers.correct"] == 6
    assert "transformers.ratio_total" not in found


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("policies", [["full"], ["pask"], ["full", "pask"]])
def test_the_figures_of_a_run_are_those_announced(policies, reference):
    names = [*policies, *(["transformers"] if reference else [])]
    finished = {name: {case.id: record(case, True, [1]) for case in CASES} for name in names}
    categories = ["simple_python", "multiple"]
    announced = figure_names(policies, categories, reference=reference)
    assert sorted(figures(finished, CASES, categories, CALIBRATED)) == sorted(announced)


class Killed(BaseException):
    """What no handler catches, as a kill."""


class StubEngine:
    """Answers every request rightly, the last of a batch first; dies before result number `dies_after`."""

    dies_after = None
    served = 0

    def __init__(self, model, policy, rows):
        self.rows = rows

    def run(self, requests):
        batch = []
        for request in requests:
            batch.append(request)
            if len(batch) == self.rows:
                yield from map(self.serve, reversed(batch))
                batch = []
        yield from map(self.serve, batch)

    def serve(self, request):
        if StubEngine.served == StubEngine.dies_after:
            raise Killed
        StubEngine.served += 1
        calls = gold_calls(next(case for case in CASES if case.id == request.request_id))
        return SimpleNamespace(
            request_id=request.request_id,
            calls=calls,
            text=json.dumps(calls[0]),
            token_ids=(1, 2, 3),
            finish_reason="stop",
            error=None,
            cost=COST,
            seconds_prefill=1.0,
            seconds_decode=0.5,
        )


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(jaxkv.engine, "Engine", StubEngine, raising=False)
    monkeypatch.setattr(jaxkv.engine, "Request", SimpleNamespace, raising=False)
    monkeypatch.setattr(bfcl_run, "constraint_of", lambda case, model: None)
    monkeypatch.setattr(StubEngine, "dies_after", None)
    monkeypatch.setattr(StubEngine, "served", 0)
    return StubEngine


def evaluate(path):
    seen = []
    with Journal(path, {"policy": "full"}) as journal:
        run_policy(None, None, CASES, journal, rows=2, max_new_tokens=160, on_case=seen.append)
        return figures({"full": journal.finished}, CASES, ["simple_python", "multiple"], CALIBRATED), seen


def test_a_killed_run_goes_on_where_it_stopped(engine, tmp_path):
    whole, seen = evaluate(tmp_path / "whole.jsonl")
    assert whole["full.correct"] == whole["full.total"] == len(seen) == 6
    engine.served, engine.dies_after = 0, 3
    with pytest.raises(Killed):
        evaluate(tmp_path / "killed.jsonl")
    with (tmp_path / "killed.jsonl").open("a") as stream:
        stream.write('{"id": "simple_pyth')  # the item in flight
    engine.served, engine.dies_after = 0, None
    resumed, seen = evaluate(tmp_path / "killed.jsonl")
    assert resumed == whole
    assert len(seen) == engine.served == 3
    lines = [sorted((tmp_path / name).read_text().splitlines()) for name in ("whole.jsonl", "killed.jsonl")]
    assert lines[0] == lines[1]
    evaluate(tmp_path / "killed.jsonl")
    assert engine.served == 3  # nothing is run again


def test_a_case_without_a_grammar_is_wrong_and_its_neighbours_run(engine, tmp_path, monkeypatch):
    from jaxkv.errors import SchemaError

    def refuse(case, model):
        if case is CASES[1]:
            raise SchemaError("tools[0].parameters: no")

    monkeypatch.setattr(bfcl_run, "constraint_of", refuse)
    found, seen = evaluate(tmp_path / "full.jsonl")
    assert (found["full.correct"], found["full.total"], len(seen)) == (5, 6, 6)
    with Journal(tmp_path / "full.jsonl", {"policy": "full"}) as journal:
        assert journal.finished[CASES[1].id]["engine_error"] == "SchemaError: tools[0].parameters: no"


def test_a_policys_identity_follows_its_table():
    prior, high, full = (policy_identity(load_policy(name)) for name in ("structural-prior", "all_high", "full"))
    assert prior["sha256"] != high["sha256"]
    assert "sha256" not in full
    assert prior == policy_identity(load_policy("structural-prior"))
