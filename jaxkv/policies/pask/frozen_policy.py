"""A frozen PASK policy as a value: everything that A.4 says a policy records, and how it becomes JSON."""

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from jaxkv.grammar.prompt_labels import PROMPT_LABELS
from jaxkv.grammar.tags import CALL_VOCABULARY, SQL_VOCABULARY, TagVocabulary
from jaxkv.policies.base import DEFAULT_SINKS, DEFAULT_WINDOW
from jaxkv.policies.pask.table import Entry, fallback_actions
from jaxkv.state.actions import ACTION_NAMES
from jaxkv.state.payload import GROUP_NAMES, HIGH_BITS, LOW_BITS, SCALE_BITS

FORMAT = 1
GRAMMARS: dict[str, TagVocabulary] = {one.family: one for one in (CALL_VOCABULARY, SQL_VOCABULARY)}
TAG_FIELDS = ("classes", "roles", "states", "nexts")
# What this version of jaxkv implements. A file that says otherwise cannot be honoured.
QUANTIZER = {
    "bits": LOW_BITS,
    "codes": [-7, 7],
    "scale": "max|x| / 7 in float16, one for each token, KV head, key and value",
    "symmetric": True,
}
COSTS = {
    "counted": "bits of keys and values for each token and layer group",
    "high_bits": HIGH_BITS,
    "low_bits": LOW_BITS,
    "scale_bits": SCALE_BITS,
    "odd_width_padding_bits": LOW_BITS,
}
TIE_ORDER = {"decode": ["score", "group", "level"], "prompt": ["score", "token", "group", "level"]}


@dataclass(frozen=True)
class ModelKey:
    """The model that a policy was made for; None everywhere for a policy that fits any model."""

    fingerprint: str | None = None
    num_layers: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None


@dataclass(frozen=True)
class Reserve:
    """Gamma (PASK Eqs. 10, 16): for each parser state a pair (F, h) that means [F * C_full - h * b]+.

    F is the sum of h floor costs as a fraction of C_full, so that it carries over to a model of another size. `pooled`
    serves the parser states that are not listed.
    """

    horizon: int = 8
    quantile: Fraction = Fraction(4, 5)
    states: dict[str, tuple[Fraction, int]] = field(default_factory=dict)
    pooled: tuple[Fraction, int] = (Fraction(0), 0)


@dataclass(frozen=True)
class FrozenPolicy:
    """One frozen policy (PASK A.4).

    `decode` maps "class/role/state/next" and `prompt` maps a label of Table 6 to one entry a layer group. `boundaries`
    are the layer groups as (start, stop), or None for the paper's thirds (A.2). `thresholds` record how calibration
    chose, if it did: free-form names to rationals as "p/q". Budgets are B_D and B_P.
    """

    name: str
    calibrated: bool
    note: str
    decode: dict[str, tuple[Entry, ...]]
    prompt: dict[str, tuple[Entry, ...]]
    budget_decode: Fraction
    budget_prompt: Fraction
    xgrammar: str
    reserve: Reserve = field(default_factory=Reserve)
    vocabulary: TagVocabulary = CALL_VOCABULARY
    prompt_labels: tuple[str, ...] = PROMPT_LABELS
    groups: tuple[str, ...] = GROUP_NAMES
    boundaries: tuple[tuple[int, int], ...] | None = None
    model: ModelKey = field(default_factory=ModelKey)
    sinks: int = DEFAULT_SINKS
    window: int = DEFAULT_WINDOW
    thresholds: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The policy file's content, without its checksum."""

        def table(entries: dict[str, tuple[Entry, ...]]) -> dict[str, Any]:
            return {
                key: {
                    group: {
                        "base": ACTION_NAMES[entry.base],
                        "floor": ACTION_NAMES[entry.floor],
                        "scores": list(entry.scores),
                    }
                    for group, entry in zip(self.groups, row, strict=True)
                }
                for key, row in sorted(entries.items())
            }

        def pair(reserve: tuple[Fraction, int]) -> list[Any]:
            return [str(reserve[0]), reserve[1]]

        return {
            "format": FORMAT,
            "name": self.name,
            "calibrated": self.calibrated,
            "note": self.note,
            "grammar": self.vocabulary.family,
            "xgrammar": self.xgrammar,
            "vocabulary": vocabulary_json(self.vocabulary),
            "prompt_labels": list(self.prompt_labels),
            "groups": list(self.groups),
            "layers": "thirds" if self.boundaries is None else [list(group) for group in self.boundaries],
            "model_fingerprint": self.model.fingerprint,
            "num_layers": _any(self.model.num_layers),
            "num_kv_heads": _any(self.model.num_kv_heads),
            "head_dim": _any(self.model.head_dim),
            "quantizer": QUANTIZER,
            "costs": COSTS,
            "tie_order": TIE_ORDER,
            "sinks": self.sinks,
            "window": self.window,
            "thresholds": self.thresholds,
            "budgets": {"decode": str(self.budget_decode), "prompt": str(self.budget_prompt)},
            "reserve": {
                "horizon": self.reserve.horizon,
                "quantile": str(self.reserve.quantile),
                "states": {state: pair(value) for state, value in sorted(self.reserve.states.items())},
                "pooled": pair(self.reserve.pooled),
            },
            "decode": table(self.decode),
            "fallback": {
                prefix: {group: ACTION_NAMES[action] for group, action in zip(self.groups, actions, strict=True)}
                for prefix, actions in fallback_actions(self.decode).items()
            },
            "prompt": table(self.prompt),
        }


def vocabulary_json(vocabulary: TagVocabulary) -> dict[str, Any]:
    """The vocabulary's values; its family is the file's `grammar`."""
    fields = {name: list(getattr(vocabulary, name)) for name in TAG_FIELDS}
    return {**fields, "rest_state": vocabulary.rest_state}


def tag_names(vocabulary: TagVocabulary) -> tuple[str, ...]:
    """ "class/role/state/next" of every tag in id order."""
    return tuple("/".join(vocabulary.tag(i)) for i in range(vocabulary.size))


def _any(value: int | None) -> int | str:
    return "any" if value is None else value
