"""Which keys calibration tells apart: tags, or tags with some of their fields left out (PASK C.5)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from jaxkv.errors import EvaluationError
from jaxkv.grammar.tags import UNRESOLVED, TagVocabulary

FIELDS: Final = ("class", "role", "state", "next")
VARIANTS: Final = {
    "canonical": FIELDS,
    "no-class": ("role", "state", "next"),
    "no-role": ("class", "state", "next"),
    "no-state-and-lookahead": ("class", "role"),
}
"""The fields of a tag that make a key, by variant."""


@dataclass(frozen=True)
class Keys:
    """Decode keys of a vocabulary: each tag belongs to one, "class/role/state/next" with "*" for a field left out.

    Fields:
        vocabulary: the tags.
        fields: the fields that make a key; those left out are tied.
        chosen: keep only the keys of these names, in the order of their first tag; the tags of others have none.
    """

    vocabulary: TagVocabulary
    fields: tuple[str, ...] = FIELDS
    chosen: frozenset[str] | None = None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Key names by number."""
        every = dict.fromkeys(self._name(i) for i in range(self.vocabulary.size))
        return tuple(name for name in every if self.chosen is None or name in self.chosen)

    @cached_property
    def of_tag(self) -> tuple[int | None, ...]:
        """The key of every tag."""
        number = {name: i for i, name in enumerate(self.names)}
        return tuple(number.get(self._name(i)) for i in range(self.vocabulary.size))

    def tags(self, key: int) -> list[int]:
        """The tags of a key."""
        return [tag for tag, found in enumerate(self.of_tag) if found == key]

    def of_token(self, tags: Sequence[int]) -> tuple[int, ...]:
        """The keys of a token's candidate tags, each once; () for a token that is unresolved or has no key."""
        keys = {None if tag == UNRESOLVED else self.of_tag[tag] for tag in tags}
        return () if None in keys else tuple(sorted(key for key in keys if key is not None))

    def _name(self, tag: int) -> str:
        values = dict(zip(FIELDS, self.vocabulary.tag(tag), strict=True))
        return "/".join(values[field] if field in self.fields else "*" for field in FIELDS)


def keys_of(variant: str, vocabulary: TagVocabulary) -> Keys:
    """The keys of a variant. Raises EvaluationError for a name that is none."""
    if variant not in VARIANTS:
        raise EvaluationError(f"variant {variant!r} is unknown; choose one of {', '.join(VARIANTS)}")
    return Keys(vocabulary, VARIANTS[variant])
