"""Splits of benchmark cases into calibration, development and test, 1:1:3 (PASK C.1).

Cases that share a tool schema stay together, over all categories, so that no part has seen another's schema. A schema
is a case's whole list of tools, without descriptions' blanks, key order or the order of the tools.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from jaxkv.errors import EvaluationError
from jaxkv.evaluation.bfcl import Case
from jaxkv.evaluation.figures import write_atomically

PARTS: Final = ("calibration", "development", "test")
SHARES: Final = {"calibration": 1, "development": 1, "test": 3}


@dataclass(frozen=True)
class Split:
    """Which cases are in which part: part -> category -> case ids, in the benchmark's order."""

    seed: int
    parts: Mapping[str, Mapping[str, tuple[str, ...]]]

    def ids(self, part: str) -> frozenset[str]:
        """All case ids of a part."""
        if part not in self.parts:
            raise EvaluationError(f"no part is named {part!r}; choose one of {', '.join(PARTS)}")
        return frozenset(one for ids in self.parts[part].values() for one in ids)

    def save(self, path: str | Path) -> None:
        """Write the split as JSON, whole or not at all."""
        parts = {part: {name: list(ids) for name, ids in by.items()} for part, by in self.parts.items()}
        write_atomically(path, json.dumps({"seed": self.seed, "parts": parts}, indent=1) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> "Split":
        """Read a split. Raises EvaluationError for a file that is missing or is no split."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            parts = {part: {name: tuple(ids) for name, ids in data["parts"][part].items()} for part in PARTS}
            split = cls(int(data["seed"]), parts)
        except OSError as error:
            raise EvaluationError(
                f"{path}: cannot be read ({error.strerror}); make it with calibration/run.py"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EvaluationError(
                f"{path}: is not a split ({error!r}); make it anew with calibration/run.py"
            ) from error
        every = [one for part in PARTS for ids in parts[part].values() for one in ids]
        if twice := [one for one, number in Counter(every).items() if number > 1]:
            raise EvaluationError(f"{path}: {twice[0]} is in two parts; make it anew with calibration/run.py")
        return split


def schema_key(tools: Sequence[Mapping[str, Any]]) -> str:
    """A digest that is equal for lists of tools that say the same."""
    normal = sorted(json.dumps(_normal(tool), sort_keys=True, ensure_ascii=False) for tool in tools)
    return hashlib.sha256("\n".join(normal).encode()).hexdigest()


def _normal(value: Any) -> Any:
    if isinstance(value, str):
        return re.sub(r"\s+", " ", value).strip()
    if isinstance(value, Mapping):
        return {key: _normal(item) for key, item in value.items()}
    return [_normal(item) for item in value] if isinstance(value, list) else value


def split_cases(cases: Sequence[Case], seed: int) -> Split:
    """Deal the cases of all categories out, 1:1:3 in each category.

    Sizes are exact (a fifth, rounded down, for calibration and for development, the rest for testing) wherever whole
    schemas allow it: shared ones are dealt first, the largest first, each to the part that lacks most of what it holds,
    single ones fill up. Ties and the order of equals come from the seed.
    """
    totals = Counter(case.category for case in cases)
    room = {part: {name: _size(part, total) for name, total in totals.items()} for part in PARTS}
    together: dict[str, list[Case]] = {}
    for case in cases:
        together.setdefault(schema_key(case.tools), []).append(case)
    rng = np.random.default_rng(seed)
    keys = sorted(together)
    keys = [keys[i] for i in rng.permutation(len(keys))]
    keys.sort(key=lambda key: -len(together[key]))  # stable: equals stay shuffled
    chosen: dict[str, str] = {}
    for key in keys:
        need = Counter(case.category for case in together[key])

        def fit(part: str, need: Counter[str] = need) -> tuple[int, float]:
            over = sum(max(0, number - room[part][name]) for name, number in need.items())
            left = sum(room[part][name] / max(1, _size(part, totals[name])) for name in need)
            return over, -left

        part = min(PARTS, key=fit)
        for name, number in need.items():
            room[part][name] -= number
        chosen |= {case.id: part for case in together[key]}
    return Split(
        seed,
        {
            part: {name: tuple(c.id for c in cases if c.category == name and chosen[c.id] == part) for name in totals}
            for part in PARTS
        },
    )


def _size(part: str, total: int) -> int:
    fifth = total // sum(SHARES.values())
    return total - 2 * fifth if part == "test" else fifth
