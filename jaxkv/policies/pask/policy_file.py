"""Reads, checks and writes policy files: one JSON file, its checksum over the canonical JSON of everything else."""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from jaxkv.errors import PolicyError
from jaxkv.grammar.tags import TagVocabulary
from jaxkv.policies.pask.frozen_policy import (
    COSTS,
    FORMAT,
    GRAMMARS,
    PROMPT_LABELS,
    QUANTIZER,
    TAG_FIELDS,
    TIE_ORDER,
    FrozenPolicy,
    ModelKey,
    Reserve,
    tag_names,
    vocabulary_json,
)
from jaxkv.policies.pask.table import Entry, fallback_actions
from jaxkv.state.actions import ACTION_NAMES
from jaxkv.state.payload import GROUP_NAMES

_RATIONAL = re.compile(r"\d{1,18}(/[1-9]\d{0,17})?")
_FIELDS = frozenset(
    [
        "format",
        "name",
        "calibrated",
        "note",
        "grammar",
        "xgrammar",
        "vocabulary",
        "prompt_labels",
        "groups",
        "layers",
        "model_fingerprint",
        "num_layers",
        "num_kv_heads",
        "head_dim",
        "quantizer",
        "costs",
        "tie_order",
        "sinks",
        "window",
        "thresholds",
        "budgets",
        "reserve",
        "decode",
        "fallback",
        "prompt",
        "sha256",
    ]
)


def checksum(data: dict[str, Any]) -> str:
    """sha256 of the canonical JSON (sorted keys, no spaces, UTF-8) of everything but the checksum itself."""
    content = {key: value for key, value in data.items() if key != "sha256"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def save_policy(policy: FrozenPolicy, path: str | Path) -> Path:
    """Write the policy file with its checksum, whole or not at all. Raises PolicyError for a bad policy."""
    data = policy.to_json()
    data["sha256"] = checksum(data)
    parse_policy(data, str(path))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(_layout(data), encoding="utf-8")
    os.replace(partial, path)
    return path


def read_policy(path: str | Path) -> FrozenPolicy:
    """Read and check a policy file. PolicyError says which field is wrong, its value, and what to do."""
    where = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PolicyError(f"{where}: cannot be read ({error.strerror}); give the path of a policy file") from error
    except UnicodeDecodeError as error:
        raise PolicyError(f"{where}: is not UTF-8 text ({error}); fetch the policy file again") from error
    try:
        data = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constants)
    except ValueError as error:
        raise PolicyError(f"{where}: is not JSON ({error}); fetch the policy file again") from error
    return parse_policy(data, where)


def parse_policy(data: Any, where: str) -> FrozenPolicy:
    """Check a policy file's content and build the policy. `where` names the file in errors."""
    fields = _Fields(data, where)
    fields.expect(isinstance(data, dict), "top level", type(data).__name__, "a JSON object")
    if data.get("format") != FORMAT:
        fields.fail("format", data.get("format"), f"{FORMAT}, the format this version of jaxkv reads")
    missing, unknown = sorted(_FIELDS - data.keys()), sorted(data.keys() - _FIELDS)
    fields.expect(not missing, "missing fields", missing, "none missing")
    fields.expect(not unknown, "unknown fields", unknown, "no others")
    found = checksum(data)
    if data["sha256"] != found:
        raise PolicyError(
            f"{where}: sha256 is {data['sha256']!r}, but the content has {found}; the file was changed after it was "
            "frozen. Fetch it again, or write a changed policy with save_policy"
        )
    for name, implemented in (("quantizer", QUANTIZER), ("costs", COSTS), ("tie_order", TIE_ORDER)):
        fields.expect(data[name] == implemented, name, data[name], f"{implemented}, which is what jaxkv implements")
    fields.expect(data["groups"] == list(GROUP_NAMES), "groups", data["groups"], f"{list(GROUP_NAMES)}")
    fields.expect(
        data["prompt_labels"] == list(PROMPT_LABELS), "prompt_labels", data["prompt_labels"], "those of Table 6"
    )
    fields.expect(data["grammar"] in GRAMMARS, "grammar", data["grammar"], f"one of {sorted(GRAMMARS)}")
    vocabulary = _vocabulary(fields)
    decode = _table(fields, "decode", tag_names(vocabulary))
    return FrozenPolicy(
        name=fields.text("name"),
        calibrated=fields.of_type("calibrated", bool, "true or false"),
        note=fields.of_type("note", str, "a text"),
        xgrammar=fields.text("xgrammar"),
        vocabulary=vocabulary,
        boundaries=_boundaries(fields),
        model=_model(fields),
        sinks=fields.integer("sinks", 0),
        window=fields.integer("window", 0),
        thresholds=_thresholds(fields),
        budget_decode=fields.share("budgets.decode"),
        budget_prompt=fields.share("budgets.prompt"),
        reserve=_reserve(fields),
        decode=_checked_fallback(fields, decode),
        prompt=_prompt(fields),
    )


def differences(policy: FrozenPolicy) -> list[str]:
    """What of the policy differs from this installation: the XGrammar version and the grammar's tag vocabulary."""
    found = []
    installed = version("xgrammar")
    if policy.xgrammar != installed:
        found.append(f"it was made with xgrammar {policy.xgrammar}, and {installed} is installed")
    current = vocabulary_json(GRAMMARS[policy.vocabulary.family])
    for name, values in vocabulary_json(policy.vocabulary).items():
        if values != current[name]:
            found.append(f"its vocabulary has the {name} {values}, and jaxkv's {current[name]}")
    return found


class _Fields:
    """Access to fields by dotted path, with errors that name file, field, value and what was expected."""

    def __init__(self, data: Any, where: str) -> None:
        self.data, self.where = data, where

    def fail(self, path: str, value: Any, expected: str) -> NoReturn:
        raise PolicyError(
            f"{self.where}: {path} is {value!r}, expected {expected}; correct the policy and save it again"
        )

    def expect(self, holds: bool, path: str, value: Any, expected: str) -> None:
        if not holds:
            self.fail(path, value, expected)

    def get(self, path: str) -> Any:
        value, seen = self.data, []
        for part in path.split("."):
            self.expect(isinstance(value, dict), ".".join(seen), value, "an object")
            seen.append(part)
            self.expect(part in value, ".".join(seen), None, "a value, and it is missing")
            value = value[part]
        return value

    def checked(self, path: str, holds: Callable[[Any], bool], expected: str) -> Any:
        value = self.get(path)
        self.expect(holds(value), path, value, expected)
        return value

    def of_type(self, path: str, kind: type, expected: str) -> Any:
        return self.checked(path, lambda value: isinstance(value, kind), expected)

    def text(self, path: str) -> str:
        return self.checked(path, lambda value: isinstance(value, str) and bool(value.strip()), "a text")

    def integer(self, path: str, least: int) -> int:
        return self.checked(path, lambda value: _is_integer(value, least), f"an integer of at least {least}")

    def rational(self, path: str, value: Any) -> Fraction:
        good = isinstance(value, str) and _RATIONAL.fullmatch(value) is not None
        self.expect(good, path, value, 'a rational as text, such as "1/2"')
        return Fraction(value)

    def share(self, path: str) -> Fraction:
        value = self.rational(path, self.get(path))
        self.expect(value <= 1, path, str(value), "a share of Full KV between 0 and 1")
        return value


def _is_integer(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _vocabulary(fields: _Fields) -> TagVocabulary:
    names: dict[str, tuple[str, ...]] = {}
    for name in TAG_FIELDS:
        values = fields.of_type(f"vocabulary.{name}", list, "a list of names")
        good = bool(values) and all(isinstance(v, str) and v and "/" not in v for v in values)
        fields.expect(good and len(set(values)) == len(values), f"vocabulary.{name}", values, "distinct names")
        names[name] = tuple(values)
    rest = fields.checked("vocabulary.rest_state", lambda value: value in names["states"], f"one of {names['states']}")
    extra = sorted(fields.get("vocabulary").keys() - {*names, "rest_state"})
    fields.expect(not extra, "vocabulary", extra, f"{TAG_FIELDS} and rest_state only")
    return TagVocabulary(family=fields.get("grammar"), rest_state=rest, **names)


def _boundaries(fields: _Fields) -> tuple[tuple[int, int], ...] | None:
    value = fields.get("layers")
    if value == "thirds":
        return None
    expected = '"thirds" or one [start, stop] a group, contiguous from 0'
    pairs = isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(_is_integer(edge, 0) for edge in pair) for pair in value
    )
    fields.expect(pairs and len(value) == len(GROUP_NAMES), "layers", value, expected)
    edges = [edge for pair in value for edge in pair]
    contiguous = edges[0] == 0 and edges == sorted(edges) and edges[1:-1:2] == edges[2:-1:2]
    fields.expect(contiguous, "layers", value, expected)
    return tuple((start, stop) for start, stop in value)


def _model(fields: _Fields) -> ModelKey:
    fingerprint = fields.checked(
        "model_fingerprint", lambda value: value is None or (isinstance(value, str) and bool(value)), "null or a text"
    )
    sizes: dict[str, int | None] = {}
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        value = fields.checked(name, lambda size: size == "any" or _is_integer(size, 1), '"any" or an integer >= 1')
        fields.expect(value != "any" or fingerprint is None, name, value, "an integer, as there is a model_fingerprint")
        sizes[name] = None if value == "any" else value
    return ModelKey(fingerprint=fingerprint, **sizes)


def _thresholds(fields: _Fields) -> dict[str, str]:
    value = fields.of_type("thresholds", dict, "an object of rationals")
    for name, threshold in value.items():
        fields.rational(f"thresholds.{name}", threshold)
    return dict(value)


def _reserve(fields: _Fields) -> Reserve:
    horizon = fields.integer("reserve.horizon", 0)

    def pair(path: str, value: Any) -> tuple[Fraction, int]:
        good = isinstance(value, list) and len(value) == 2 and _is_integer(value[1], 0) and value[1] <= horizon
        fields.expect(good, path, value, f'["F", h] with 0 <= h <= {horizon}')
        total = fields.rational(path, value[0])
        fields.expect(total <= value[1], path, value, "at most h tokens' full cost, F <= h")
        return total, value[1]

    states = fields.of_type("reserve.states", dict, "an object")
    return Reserve(
        horizon=horizon,
        quantile=fields.share("reserve.quantile"),
        states={state: pair(f"reserve.states.{state}", value) for state, value in states.items()},
        pooled=pair("reserve.pooled", fields.get("reserve.pooled")),
    )


def _table(fields: _Fields, section: str, keys: tuple[str, ...]) -> dict[str, tuple[Entry, ...]]:
    value = fields.of_type(section, dict, "an object")
    for key, row in value.items():
        fields.expect(key in keys, section, key, f"keys of the file's own vocabulary, such as {keys[0]!r}")
        good = isinstance(row, dict) and list(row) == list(GROUP_NAMES)
        fields.expect(good, f"{section}.{key}", row, f"one entry for each of {list(GROUP_NAMES)}, in order")
    return {
        key: tuple(_entry(fields, f"{section}.{key}.{group}", entry) for group, entry in row.items())
        for key, row in value.items()
    }


def _entry(fields: _Fields, path: str, value: Any) -> Entry:
    good = isinstance(value, dict) and set(value) == {"base", "floor", "scores"}
    fields.expect(good, path, value, "base, floor and scores")
    for name in ("base", "floor"):
        good = isinstance(value[name], str) and value[name] in ACTION_NAMES
        fields.expect(good, f"{path}.{name}", value[name], f"one of {list(ACTION_NAMES)}")
    scores = value["scores"]
    good = isinstance(scores, list) and len(scores) == 2 and all(_is_score(score) for score in scores)
    fields.expect(good, f"{path}.scores", scores, "two finite numbers >= 0: release -> low, low -> high")
    base, floor = ACTION_NAMES.index(value["base"]), ACTION_NAMES.index(value["floor"])
    return Entry(base, floor, (float(scores[0]), float(scores[1])))


def _is_score(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _checked_fallback(fields: _Fields, decode: dict[str, tuple[Entry, ...]]) -> dict[str, tuple[Entry, ...]]:
    stored = fields.of_type("fallback", dict, "an object")
    computed = {
        prefix: {group: ACTION_NAMES[action] for group, action in zip(GROUP_NAMES, actions, strict=True)}
        for prefix, actions in fallback_actions(decode).items()
    }
    for prefix in sorted(stored.keys() | computed.keys()):
        good = stored.get(prefix) == computed.get(prefix)
        expected = f"{computed.get(prefix)}, the maximum over the calibrated tags below it"
        fields.expect(good, f"fallback.{prefix}", stored.get(prefix), expected)
    return decode


def _prompt(fields: _Fields) -> dict[str, tuple[Entry, ...]]:
    prompt = _table(fields, "prompt", PROMPT_LABELS)
    default = PROMPT_LABELS[0]
    fields.expect(default in prompt, "prompt", sorted(prompt), f"an entry for {default!r}")
    return prompt


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError(f"an object repeats a key among {sorted(key for key, _ in pairs)}")
    return value


def _no_constants(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _layout(data: dict[str, Any]) -> str:
    """JSON with one line a field, and one for each entry of an object of objects: readable, and diffs stay small."""
    lines = []
    for key, value in data.items():
        if isinstance(value, dict) and value and all(isinstance(item, dict) for item in value.values()):
            items = ",\n".join(f"  {_dump(name)}: {_dump(item)}" for name, item in value.items())
            lines.append(f" {_dump(key)}: {{\n{items}\n }}")
        else:
            lines.append(f" {_dump(key)}: {_dump(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
