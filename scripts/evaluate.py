"""Measure accuracy and KV payload of policies on a benchmark.

    python scripts/evaluate.py bfcl --categories simple_python --limit 40 --policy full,structural-prior \
        --check 'full.correct >= 19' --json figures.json
    python scripts/evaluate.py sql --data FOLDER --policy full,all_high_sql --limit 40 --json figures.json

Finished cases lie in the output folder, one journal a policy; a run with the same configuration goes on where the last
one stopped. Exit code 0; 1 when a check does not hold (the last line names its figure); 2 for a bad input.
"""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxkv.errors import EvaluationError
from jaxkv.evaluation.bfcl import CATEGORIES, Case, check_selection, load
from jaxkv.evaluation.figures import Check, finish, output_console, parse_checks, run_record, run_script


@dataclasses.dataclass(frozen=True)
class Bfcl:
    """BFCL's single-turn Python categories, judged by its official AST checker.

    Figures, `<policy>.<figure>` over all cases and `<policy>.<category>.<figure>`: correct, total, accuracy;
    ratio_total (scheduled payload of prompt and answer over Full KV's), ratio_prefill, ratio_decode, ratio_live
    (payload held, summed over decode steps, over Full KV's); allocated_bytes; same_tokens_as_full (share of cases);
    and `<policy>.calibrated`, false for a policy whose values were set by hand.
    """

    categories: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Comma-separated or repeated; all by default."""
    limit: int | None = None
    """Cases of each category."""
    stride: int = 1
    """Take every so many-th case."""
    policy: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Policy names or files, comma-separated or repeated; full and structural-prior by default."""
    transfer: bool = False
    """Use policies that were made for another model."""
    batch: int = 1
    """Rows that are generated together."""
    max_new_tokens: int = 160
    """Longest answer in tokens."""
    model: str = "smollm2-135m"
    """Model name, Hugging Face folder or hub id."""
    json: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the figures as JSON; - is standard output, alone."""
    check: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="EXPRESSION")] = ()
    """A bound on a figure, such as 'full.correct >= 19'; repeatable."""
    out: Path = Path("runs/bfcl")
    """Folder of the journals and of run.json."""
    grammar_coverage: bool = False
    """Generate nothing; feed the expected answers to the grammars. Figures: <category>.gold_accepted (share) and
    <category>.gold_rejected_fitting (how many of the rejected fit their own schema)."""
    compare_torch: bool = False
    """Also run transformers with the same prompts and grammar (float32, greedy): transformers.correct and
    full.same_tokens_as_transformers (number of cases)."""


@dataclasses.dataclass(frozen=True)
class Sql:
    """Text-to-SQL from a folder in BIRD's or GeoQuery's format, judged by executing the queries (BIRD's EX).

    Figures, `<policy>.<figure>` over all questions and `<policy>.<difficulty>.<figure>`: correct, executable (queries
    that ran within the limits), total, accuracy; ratio_total, ratio_prefill, ratio_decode, ratio_live,
    allocated_bytes, same_tokens_as_full as for bfcl; and `<policy>.calibrated`.
    """

    data: Path
    """Folder with the questions' JSON file and the databases."""
    limit: int | None = None
    """Number of questions."""
    stride: int = 1
    """Take every so many-th question."""
    policy: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Policy names or files, comma-separated or repeated; full by default."""
    transfer: bool = False
    """Use policies that were made for another model."""
    batch: int = 1
    """Rows that are generated together."""
    max_new_tokens: int = 200
    """Longest answer in tokens."""
    model: str = "smollm2-135m"
    """Model name, Hugging Face folder or hub id."""
    json: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the figures as JSON; - is standard output, alone."""
    check: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="EXPRESSION")] = ()
    """A bound on a figure, such as 'full.correct >= 19'; repeatable."""
    out: Path = Path("runs/sql")
    """Folder of the journals and of run.json."""
    grammar_coverage: bool = False
    """Generate nothing; feed the expected queries to the grammars. Figures: gold_accepted (share), gold_total and
    gold_rejected_by_sqlite_too (how many of the rejected SQLite cannot run either)."""


def listed(values: Sequence[str], default: Sequence[str]) -> tuple[str, ...]:
    """Comma-separated or repeated values, each once, in order."""
    names = [name.strip() for value in values for name in value.split(",") if name.strip()]
    return tuple(dict.fromkeys(names or default))


@contextmanager
def progress(console: Console, title: str, total: int, done: int = 0) -> Iterator:
    """A bar with the time left, on standard error; yields the function that moves it on by one case."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total, completed=done)
        yield lambda case: bar.advance(task)


def bfcl(arguments: Bfcl) -> int:
    categories = listed(arguments.categories, CATEGORIES)
    policies = listed(arguments.policy, ("full", "structural-prior"))
    check_selection(categories, arguments.limit, arguments.stride)
    check_at_least_one(arguments)

    from jaxkv.evaluation.bfcl_run import figure_names
    from jaxkv.policies.registry import load_policy

    if arguments.compare_torch and "full" not in policies:
        raise EvaluationError(f"--compare-torch compares with full, which is not among {', '.join(policies)}; add it")
    loaded = [load_policy(name, transfer=arguments.transfer) for name in policies]
    names = [policy.name for policy in loaded]
    if len(set(names)) < len(names):
        raise EvaluationError(f"the policies {', '.join(policies)} share a name; run them one at a time")
    known = figure_names(names, categories, coverage=arguments.grammar_coverage, reference=arguments.compare_torch)
    checks = parse_checks(arguments.check, known)
    cases = [case for category in categories for case in load(category, limit=arguments.limit, stride=arguments.stride)]
    if arguments.grammar_coverage:
        return coverage(arguments, categories, len(cases), checks)
    return accuracy(arguments, categories, policies, cases, checks)


def coverage(arguments: Bfcl, categories: Sequence[str], total: int, checks: Sequence[Check]) -> int:
    from jaxkv.evaluation.bfcl_coverage import grammar_coverage

    console = output_console(arguments.json)
    with progress(console, "expected answers", total) as on_case:
        found = grammar_coverage(categories, limit=arguments.limit, stride=arguments.stride, on_case=on_case)
    figures = {}
    for category, one in found.items():
        console.print(f"{category}: {one.accepted} of {one.total} accepted", markup=False)
        for rejection in one.rejected:
            console.print(f"  {rejection}", markup=False, soft_wrap=True)
        figures[f"{category}.gold_accepted"] = one.share
        figures[f"{category}.gold_rejected_fitting"] = sum(not rejection.contradictions for rejection in one.rejected)
    return finish(figures, arguments.json, checks)


def accuracy(
    arguments: Bfcl,
    categories: Sequence[str],
    policies: Sequence[str],
    cases: Sequence[Case],
    checks: Sequence[Check],
) -> int:
    from jaxkv.evaluation import bfcl_run
    from jaxkv.evaluation.journal import Journal
    from jaxkv.models.loading import load_model
    from jaxkv.policies.registry import load_policy

    console = output_console(arguments.json)
    model = load_model(arguments.model)
    finished, calibrated = {}, {}
    for name in policies:
        policy = load_policy(name, model, transfer=arguments.transfer)
        config = bfcl_run.run_config(
            model, arguments.max_new_tokens, batch=arguments.batch, policy=bfcl_run.policy_identity(policy)
        )
        with Journal(arguments.out / f"{policy.name}.jsonl", config) as journal:
            done = sum(case.id in journal.finished for case in cases)
            with progress(console, policy.name, len(cases), done) as on_case:
                bfcl_run.run_policy(
                    model,
                    policy,
                    cases,
                    journal,
                    rows=arguments.batch,
                    max_new_tokens=arguments.max_new_tokens,
                    on_case=on_case,
                )
            finished[policy.name] = journal.finished
        calibrated[policy.name] = policy.calibrated
        if not policy.calibrated:
            console.print(f"{policy.name} is not calibrated: its values were set by hand", markup=False)
    if arguments.compare_torch:
        config = bfcl_run.run_config(model, arguments.max_new_tokens, **bfcl_run.reference_versions())
        with Journal(arguments.out / f"{bfcl_run.REFERENCE}.jsonl", config) as journal:
            done = sum(case.id in journal.finished for case in cases)
            with progress(console, bfcl_run.REFERENCE, len(cases), done) as on_case:
                bfcl_run.run_reference(model, cases, journal, max_new_tokens=arguments.max_new_tokens, on_case=on_case)
            finished[bfcl_run.REFERENCE] = journal.finished
    figures = bfcl_run.figures(finished, cases, categories, calibrated)
    run_record(arguments.out / "run.json", arguments, figures)
    return finish(figures, arguments.json, checks)


def sql(arguments: Sql) -> int:
    from jaxkv.evaluation import sql_run
    from jaxkv.evaluation.sql import load as load_questions
    from jaxkv.policies.registry import load_policy

    policies = listed(arguments.policy, ("full",))
    check_at_least_one(arguments)
    loaded = [load_policy(name, transfer=arguments.transfer) for name in policies]
    names = [policy.name for policy in loaded]
    if len(set(names)) < len(names):
        raise EvaluationError(f"the policies {', '.join(policies)} share a name; run them one at a time")
    sql_run.check_policies(loaded)
    found = load_questions(arguments.data, limit=arguments.limit, stride=arguments.stride)
    questions = found.questions
    levels = sql_run.difficulties(questions)
    known = sql_run.figure_names(names, levels, coverage=arguments.grammar_coverage)
    checks = parse_checks(arguments.check, known)
    console = output_console(arguments.json)
    if found.left_out:
        console.print(f"left out: {found.left_out}", markup=False)
    if arguments.grammar_coverage:
        return sql_coverage(arguments, questions, checks)

    from jaxkv.evaluation.bfcl_run import policy_identity
    from jaxkv.evaluation.journal import Journal
    from jaxkv.models.loading import load_model

    model = load_model(arguments.model)
    finished, calibrated = {}, {}
    for name in policies:
        policy = load_policy(name, model, transfer=arguments.transfer)
        config = sql_run.run_config(
            model, arguments.data, arguments.max_new_tokens, batch=arguments.batch, policy=policy_identity(policy)
        )
        with Journal(arguments.out / f"{policy.name}.jsonl", config) as journal:
            done = sum(question.id in journal.finished for question in questions)
            with progress(console, policy.name, len(questions), done) as on_question:
                sql_run.run_policy(
                    model,
                    policy,
                    questions,
                    journal,
                    rows=arguments.batch,
                    max_new_tokens=arguments.max_new_tokens,
                    on_question=on_question,
                )
            finished[policy.name] = journal.finished
        calibrated[policy.name] = policy.calibrated
        if not policy.calibrated:
            console.print(f"{policy.name} is not calibrated: its values were set by hand", markup=False)
    figures = sql_run.figures(finished, questions, calibrated)
    run_record(arguments.out / "run.json", arguments, figures)
    return finish(figures, arguments.json, checks)


def sql_coverage(arguments: Sql, questions: Sequence, checks: Sequence[Check]) -> int:
    from jaxkv.evaluation.sql_coverage import grammar_coverage

    console = output_console(arguments.json)
    with progress(console, "expected queries", len(questions)) as on_question:
        found = grammar_coverage(questions, on_question)
    console.print(f"{found.total - len(found.rejected)} of {found.total} accepted", markup=False)
    for rejection in found.rejected:
        console.print(f"  {rejection}", markup=False, soft_wrap=True)
    figures = {
        "gold_accepted": found.share,
        "gold_total": found.total,
        "gold_rejected_by_sqlite_too": sum(bool(rejection.sqlite) for rejection in found.rejected),
    }
    return finish(figures, arguments.json, checks)


def check_at_least_one(arguments: Bfcl | Sql) -> None:
    for name in ("batch", "max_new_tokens"):
        if getattr(arguments, name) < 1:
            raise EvaluationError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: give at least 1")


def cli(arguments: Sequence[str] | None = None) -> int:
    """Run the script with these command-line arguments, by default the process's; gives the exit code."""
    parsed = tyro.extras.subcommand_cli_from_dict({"bfcl": Bfcl, "sql": Sql}, description=__doc__, args=arguments)
    return run_script(lambda: sql(parsed) if isinstance(parsed, Sql) else bfcl(parsed))


if __name__ == "__main__":
    sys.exit(cli())
