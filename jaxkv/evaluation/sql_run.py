"""Runs text-to-SQL questions through a policy and turns finished questions into figures."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jaxkv.errors import EvaluationError, JaxkvError
from jaxkv.evaluation.bfcl_run import RATIOS
from jaxkv.evaluation.figures import Figure
from jaxkv.evaluation.journal import Journal
from jaxkv.evaluation.sql import SYSTEM_PROMPT, Question, judge, schema_of
from jaxkv.evaluation.sql_execution import MAX_ROWS, TIMEOUT_S
from jaxkv.grammar.sql import SqlQueries
from jaxkv.grammar.tags import SQL_VOCABULARY
from jaxkv.state.payload import Cost

if TYPE_CHECKING:
    from jaxkv.models.loading import Model

COUNTED: Final = ("correct", "executable", "total", "accuracy")


def check_policies(policies: Iterable[Any]) -> None:
    """Raise EvaluationError for a policy that acts on the tags of another grammar."""
    for policy in policies:
        if policy.needs.tags and policy.vocabulary != SQL_VOCABULARY:
            raise EvaluationError(
                f"policy '{policy.name}' knows the tags of {policy.vocabulary.family}, not of sql; "
                "use full, all_high_sql or a policy made for sql"
            )


def run_config(model: "Model", data: Path, max_new_tokens: int, **more: Any) -> dict[str, Any]:
    """What decides a question's result: two runs with the same configuration may share a journal."""
    return {
        "model": model.name,
        "fingerprint": model.fingerprint,
        "dtype": model.config.dtype,
        "data": str(data.resolve()),
        "max_new_tokens": max_new_tokens,
        "prompt": SYSTEM_PROMPT,
        "timeout_s": TIMEOUT_S,
        "max_rows": MAX_ROWS,
        **{name: metadata.version(name) for name in ("jaxkv", "xgrammar")},
        **more,
    }


def run_policy(
    model: "Model",
    policy: Any,
    questions: Sequence[Question],
    journal: Journal,
    *,
    rows: int,
    max_new_tokens: int,
    on_question: Callable[[Question], None],
) -> None:
    """Run the questions that the journal lacks, `rows` at a time, and record each as it finishes.

    A question whose database has no grammar, or that the engine refuses, is recorded as wrong with its error.
    """
    from jaxkv.engine import Engine, Request

    by_id = {question.id: question for question in questions if question.id not in journal.finished}
    grammars: dict[Path, SqlQueries] = {}

    def requests() -> Iterator[Request]:
        for question in by_id.values():
            try:
                if question.database not in grammars:
                    grammars[question.database] = SqlQueries(schema_of(question.database), model.tokenizer)
                messages = question.messages
            except JaxkvError as error:
                journal.add(_judged(question, None, "", (), "error", str(error)) | {"cost": None, "seconds": 0.0})
                on_question(question)
                continue
            yield Request(
                request_id=question.id,
                messages=messages,
                constraint=grammars[question.database],
                max_new_tokens=max_new_tokens,
            )

    for result in Engine(model, policy, rows=rows).run(requests()):
        question = by_id[result.request_id]
        record = _judged(question, result.sql, result.text, result.token_ids, result.finish_reason, result.error)
        seconds = result.seconds_prefill + result.seconds_decode
        journal.add(record | {"cost": dataclasses.asdict(result.cost), "seconds": seconds})
        on_question(question)


def _judged(
    question: Question, query: str | None, text: str, token_ids: Iterable[int], reason: str, error: str | None
) -> dict[str, Any]:
    return {
        "id": question.id,
        "difficulty": question.difficulty,
        **dataclasses.asdict(judge(question, query)),
        "finish_reason": reason,
        "engine_error": error,
        "text": text,
        "gold": question.gold,
        "token_ids": [int(token) for token in token_ids],
    }


def difficulties(questions: Iterable[Question]) -> list[str]:
    """The difficulties of a set, in the order in which they come."""
    return list(dict.fromkeys(question.difficulty for question in questions if question.difficulty))


def figure_names(policies: Sequence[str], levels: Sequence[str], *, coverage: bool = False) -> list[str]:
    """The figures that a run will have, known before it starts."""
    if coverage:
        return ["gold_accepted", "gold_total", "gold_rejected_by_sqlite_too"]
    names = []
    for policy in policies:
        names.append(f"{policy}.calibrated")
        for scope in (policy, *(f"{policy}.{level}" for level in levels)):
            names += [f"{scope}.{name}" for name in (*COUNTED, *RATIOS, "allocated_bytes")]
            if policy != "full" and "full" in policies:
                names.append(f"{scope}.same_tokens_as_full")
    return names


def figures(
    finished: Mapping[str, Mapping[str, Mapping[str, Any]]],
    questions: Sequence[Question],
    calibrated: Mapping[str, bool],
) -> dict[str, Figure]:
    """Flat figures of finished questions, over all of them and for each difficulty.

    Args:
        finished: for every policy the finished records by question id.
        questions: the questions to count; each is finished in every policy.
        calibrated: for every policy whether it is calibrated, or set by hand; a figure of its own.

    Figures: `correct`, `executable` (queries that ran within the limits), `total`, `accuracy` = correct / total
    (BIRD's EX); the four ratios, each a ratio of sums over the questions; `allocated_bytes`, the largest;
    `same_tokens_as_full`, the share of questions whose token ids equal Full KV's.
    """
    result: dict[str, Figure] = {}
    for policy, records in finished.items():
        result[f"{policy}.calibrated"] = calibrated[policy]
        for level in (None, *difficulties(questions)):
            scope = policy if level is None else f"{policy}.{level}"
            ids = [question.id for question in questions if level in (None, question.difficulty)]
            chosen = [records[name] for name in ids]
            correct = sum(record["correct"] for record in chosen)
            cost = sum((Cost(**record["cost"]) for record in chosen if record["cost"] is not None), Cost())
            result |= {
                f"{scope}.correct": correct,
                f"{scope}.executable": sum(record["executable"] for record in chosen),
                f"{scope}.total": len(chosen),
                f"{scope}.accuracy": correct / len(chosen) if chosen else None,
                **{f"{scope}.{name}": getattr(cost, name) for name in RATIOS},
                f"{scope}.allocated_bytes": cost.allocated_bytes,
            }
            if policy != "full" and "full" in finished:
                same = sum(records[name]["token_ids"] == finished["full"][name]["token_ids"] for name in ids)
                result[f"{scope}.same_tokens_as_full"] = same / len(ids) if ids else None
    return result
