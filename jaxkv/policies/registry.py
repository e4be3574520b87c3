"""Finds a policy by name or file, and checks that it was made for what it is loaded for."""

from pathlib import Path
from typing import Any

from jaxkv.errors import PolicyError
from jaxkv.grammar.tags import SQL_VOCABULARY
from jaxkv.policies.base import Policy
from jaxkv.policies.full import FullKV
from jaxkv.policies.pask.all_high import all_high
from jaxkv.policies.pask.policy import Pask, report_differences
from jaxkv.policies.pask.policy_file import differences, read_policy

FROZEN = Path(__file__).parent / "frozen"


def policy_names() -> tuple[str, ...]:
    """Names that `load_policy` knows: built-in policies, then the frozen tables of the package."""
    return ("full", "all_high", "all_high_sql", *sorted(path.stem for path in FROZEN.glob("*.json")))


def load_policy(name_or_path: str | Path, model: Any = None, *, transfer: bool = False) -> Policy:
    """The policy of that name, or of that policy file.

    `model` (a `jaxkv.models` Model, or anything with `fingerprint` and `config`) has the policy checked against it now
    rather than when an engine binds it. A policy for another model, another XGrammar version or another tag vocabulary
    is a PolicyError that says what differs; with `transfer` it is a warning. A file whose checksum does not match is
    always a PolicyError.
    """
    if name_or_path == "full":
        return FullKV()
    if name_or_path == "all_high":
        return Pask(all_high())
    if name_or_path == "all_high_sql":
        return Pask(all_high(SQL_VOCABULARY))
    frozen = read_policy(_find(name_or_path))
    report_differences(frozen.name, differences(frozen), transfer)
    policy = Pask(frozen, transfer=transfer)
    if model is not None:
        policy.check_model(model.fingerprint)
    return policy


def _find(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    if isinstance(name_or_path, str) and name_or_path in policy_names():
        return FROZEN / f"{name_or_path}.json"
    if path.suffix == ".json" or path.is_file():
        return path
    raise PolicyError(
        f"unknown policy {str(name_or_path)!r}; known are {', '.join(policy_names())}, or the path of a policy file"
    )
