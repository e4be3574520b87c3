"""Verdicts of BFCL's official AST checker, without the model registry that it imports."""

import importlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from jaxkv.errors import EvaluationError
from jaxkv.evaluation.bfcl import INSTALL, Case

_REGISTRY: Final = "bfcl_eval.constants.model_config"
_MODEL_NAME: Final = "jaxkv"


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right; if not, the checker's error type and its message."""

    correct: bool
    error_type: str | None = None
    error: str | None = None


def check(case: Case, calls: Sequence[Any] | None) -> Verdict:
    """Judge an answer with BFCL's own checker.

    Args:
        case: the question.
        calls: the parsed answer, `{"name", "arguments"}` each; None for an answer that is no call.

    Returns:
        The official verdict. An answer that the checker cannot read is wrong, not an exception: the types
        `no_calls`, `malformed_calls` and `checker_failure` are ours.

    Raises:
        EvaluationError: `bfcl-eval` is not installed, or not the version whose checker this expects.
    """
    checker, python = _official_checker()
    if calls is None:
        return Verdict(False, "no_calls", "the answer holds no function call")
    try:
        answer = [{call["name"]: dict(call["arguments"])} for call in calls]
    except (KeyError, TypeError, ValueError) as error:
        return Verdict(False, "malformed_calls", f"the answer is not a list of calls: {error!r}")
    try:
        result = checker(case.tools, answer, case.gold, python, case.category, _MODEL_NAME)
    except (AttributeError, IndexError, KeyError, TypeError, UnboundLocalError) as error:
        # The checker indexes into values whose type it has not looked at yet.
        return Verdict(False, "checker_failure", f"the official checker failed on this answer: {error!r}")
    if result["valid"]:
        return Verdict(True)
    return Verdict(False, result.get("error_type", "unknown"), "; ".join(map(str, result["error"])))


@cache
def _official_checker() -> tuple[Callable[..., dict[str, Any]], Any]:
    try:
        with _stub_registry():
            module = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
            python = importlib.import_module("bfcl_eval.constants.enums").Language.PYTHON
            return module.ast_checker, python
    except (ImportError, AttributeError) as error:
        raise EvaluationError(f"BFCL's checker cannot be loaded ({error}); run: {INSTALL}") from error


class _ModelConfigs(dict):
    """Answers for every model that function names keep their dots, as ours do."""

    def __missing__(self, name: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(underscore_to_dot=False)


@contextmanager
def _stub_registry() -> Iterator[None]:
    """Stand in for the registry of model handlers while the checker is imported, and leave no trace after.

    The checker reads one flag from it, but importing it wants every vendor's client library.
    """
    previous = sys.modules.get(_REGISTRY)
    stub = types.ModuleType(_REGISTRY)
    stub.MODEL_CONFIG_MAPPING = _ModelConfigs()  # type: ignore[attr-defined]
    sys.modules[_REGISTRY] = stub
    try:
        yield
    finally:
        if previous is None:
            del sys.modules[_REGISTRY]
        else:
            sys.modules[_REGISTRY] = previous
