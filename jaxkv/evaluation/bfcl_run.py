"""Runs BFCL cases through a policy, or through transformers, and turns finished cases into figures."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

from jaxkv import prompting
from jaxkv.errors import JaxkvError
from jaxkv.evaluation import bfcl_checker
from jaxkv.evaluation.bfcl import Case
from jaxkv.evaluation.bfcl_coverage import MAX_CALLS
from jaxkv.evaluation.figures import Figure
from jaxkv.evaluation.journal import Journal
from jaxkv.grammar.function_calling import FunctionCalls
from jaxkv.policies.pask.policy import Pask
from jaxkv.policies.pask.policy_file import checksum
from jaxkv.state.payload import Cost

if TYPE_CHECKING:
    from jaxkv.models.loading import Model

REFERENCE: Final = "transformers"
"""Name that the PyTorch run has among the policies."""

COUNTED: Final = ("correct", "total", "accuracy")
RATIOS: Final = ("ratio_total", "ratio_prefill", "ratio_decode", "ratio_live")


def run_config(model: "Model", max_new_tokens: int, **more: Any) -> dict[str, Any]:
    """What decides a case's result: two runs with the same configuration may share a journal."""
    return {
        "model": model.name,
        "fingerprint": model.fingerprint,
        "dtype": model.config.dtype,
        "max_new_tokens": max_new_tokens,
        "prompt": [prompting.SYSTEM_PROMPT, prompting.PARALLEL_SYSTEM_PROMPT],
        **{name: metadata.version(name) for name in ("jaxkv", "xgrammar", "bfcl-eval")},
        **more,
    }


def policy_identity(policy: Any) -> dict[str, Any]:
    """What tells two policies apart: their fields, and for a frozen table the checksum of its content."""
    identity = {"name": policy.name, "window": policy.window, "sinks": policy.sinks}
    if isinstance(policy, Pask):
        identity["sha256"] = checksum(policy.frozen.to_json())
    return identity


def reference_versions() -> dict[str, str]:
    """Versions that decide the PyTorch run's tokens."""
    return {name: metadata.version(name) for name in ("torch", "transformers")}


def constraint_of(case: Case, model: "Model") -> FunctionCalls:
    """The grammar of a case's answer."""
    return FunctionCalls(case.tools, model.tokenizer, parallel=case.parallel, max_calls=MAX_CALLS)


def run_policy(
    model: "Model",
    policy: Any,
    cases: Iterable[Case],
    journal: Journal,
    *,
    rows: int,
    max_new_tokens: int,
    on_case: Callable[[Case], None],
) -> None:
    """Run the cases that the journal lacks, `rows` at a time, and record each as it finishes.

    A case whose schema has no grammar, or that the engine refuses, is recorded as wrong with its error.
    """
    from jaxkv.engine import Engine, Request

    by_id = {case.id: case for case in cases if case.id not in journal.finished}

    def requests() -> Iterator[Request]:
        for case in by_id.values():
            try:
                constraint = constraint_of(case, model)
            except JaxkvError as error:
                journal.add(_failure(case, error))
                on_case(case)
                continue
            yield Request(
                request_id=case.id, messages=case.messages, constraint=constraint, max_new_tokens=max_new_tokens
            )

    for result in Engine(model, policy, rows=rows).run(requests()):
        case = by_id[result.request_id]
        journal.add(
            _judged(case, result.calls, result.text, result.token_ids, result.finish_reason, result.error)
            | {
                "cost": dataclasses.asdict(result.cost),
                "seconds": result.seconds_prefill + result.seconds_decode,
            }
        )
        on_case(case)


def run_reference(
    model: "Model", cases: Iterable[Case], journal: Journal, *, max_new_tokens: int, on_case: Callable[[Case], None]
) -> None:
    """Run the cases that the journal lacks with transformers: same prompts, same grammar, float32, greedy."""
    from jaxkv.evaluation.torch_reference import generate_reference, load_reference

    pending = [case for case in cases if case.id not in journal.finished]
    reference = load_reference(model.name) if pending else None
    for case in pending:
        started = time.perf_counter()
        try:
            constraint = constraint_of(case, model)
            prompt = model.tokenizer.apply_chat_template(case.messages)
            ids, reason = generate_reference(reference, prompt, constraint, model.tokenizer.stop_ids, max_new_tokens)
            text = model.tokenizer.decode(ids)
            calls = constraint.parse(text) if reason == "stop" else None
        except JaxkvError as error:
            journal.add(_failure(case, error))
        else:
            seconds = time.perf_counter() - started
            journal.add(_judged(case, calls, text, ids, reason, None) | {"cost": None, "seconds": seconds})
        on_case(case)


def _judged(
    case: Case, calls: Any, text: str, token_ids: Iterable[int], finish_reason: str, error: str | None
) -> dict[str, Any]:
    verdict = bfcl_checker.check(case, calls)
    return {
        "id": case.id,
        "category": case.category,
        **dataclasses.asdict(verdict),
        "finish_reason": finish_reason,
        "engine_error": error,
        "text": text,
        "calls": calls,
        "token_ids": [int(token) for token in token_ids],
    }


def _failure(case: Case, error: JaxkvError) -> dict[str, Any]:
    return _judged(case, None, "", (), "error", f"{type(error).__name__}: {error}") | {"cost": None, "seconds": 0.0}


def figure_names(
    policies: Sequence[str], categories: Sequence[str], *, coverage: bool = False, reference: bool = False
) -> list[str]:
    """The figures that a run will have, known before it starts."""
    if coverage:
        return [f"{category}.{name}" for category in categories for name in ("gold_accepted", "gold_rejected_fitting")]
    scopes = ["", *(f"{category}." for category in categories)]
    names = []
    for policy in policies:
        names.append(f"{policy}.calibrated")
        for scope in scopes:
            names += [f"{policy}.{scope}{name}" for name in (*COUNTED, *RATIOS, "allocated_bytes")]
            if policy != "full" and "full" in policies:
                names.append(f"{policy}.{scope}same_tokens_as_full")
    if reference:
        for scope in scopes:
            names += [f"{REFERENCE}.{scope}{name}" for name in COUNTED]
            if "full" in policies:
                names.append(f"full.{scope}same_tokens_as_{REFERENCE}")
    return names


def figures(
    finished: Mapping[str, Mapping[str, Mapping[str, Any]]],
    cases: Sequence[Case],
    categories: Sequence[str],
    calibrated: Mapping[str, bool],
) -> dict[str, Figure]:
    """Flat figures of finished cases, over all of them and for each category.

    Args:
        finished: for every policy, and for `transformers` when it ran, the finished records by case id.
        cases: the cases to count; each is finished in every policy.
        categories: their categories.
        calibrated: for every policy whether it is calibrated, or set by hand; a figure of its own.

    Figures: `correct`, `total`, `accuracy` = correct / total; the four ratios, each a ratio of sums over the cases;
    `allocated_bytes`, the largest; `same_tokens_as_full`, the share of cases whose token ids equal Full KV's; and
    `full.same_tokens_as_transformers`, the number of such cases.
    """
    result: dict[str, Figure] = {}
    for policy, records in finished.items():
        if policy != REFERENCE:
            result[f"{policy}.calibrated"] = calibrated[policy]
        for category in (None, *categories):
            scope = policy if category is None else f"{policy}.{category}"
            ids = [case.id for case in cases if category in (None, case.category)]
            chosen = [records[name] for name in ids]
            correct = sum(record["correct"] for record in chosen)
            result[f"{scope}.correct"] = correct
            result[f"{scope}.total"] = len(chosen)
            result[f"{scope}.accuracy"] = correct / len(chosen) if chosen else None
            if policy == REFERENCE:
                continue
            cost = sum((Cost(**record["cost"]) for record in chosen if record["cost"] is not None), Cost())
            result |= {f"{scope}.{name}": getattr(cost, name) for name in RATIOS}
            result[f"{scope}.allocated_bytes"] = cost.allocated_bytes
            if policy != "full" and "full" in finished:
                same = _same(records, finished["full"], ids)
                result[f"{scope}.same_tokens_as_full"] = same / len(ids) if ids else None
            if policy == "full" and REFERENCE in finished:
                result[f"{scope}.same_tokens_as_{REFERENCE}"] = _same(records, finished[REFERENCE], ids)
    return result


def _same(records: Mapping[str, Any], others: Mapping[str, Any], ids: Iterable[str]) -> int:
    return sum(records[name]["token_ids"] == others[name]["token_ids"] for name in ids)
