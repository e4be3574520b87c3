"""Finds a policy by name or file."""

from pathlib import Path
from typing import Any

from jaxkv.errors import PolicyError
from jaxkv.policies.base import Policy
from jaxkv.policies.full import FullKV


def policy_names() -> tuple[str, ...]:
    """Names that `load_policy` knows."""
    return ("full",)


def load_policy(name_or_path: str | Path, model: Any = None, *, transfer: bool = False) -> Policy:
    """The policy of that name, or of that JSON file."""
    if name_or_path == "full":
        return FullKV()
    raise PolicyError(
        f"unknown policy {str(name_or_path)!r}; known are {', '.join(policy_names())}, or the path of a policy file"
    )
