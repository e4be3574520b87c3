"""Structural tags: the four-field vocabulary that every grammar adapter speaks (PASK Eq. 4, Table 5).

A tag says which part of a sentence a token belongs to, never which token it is:

* ``cls``: token class, ``pure_scaffold``, ``schema_bearing`` or ``free_generation``;
* ``role``: what the part is responsible for, e.g. ``dispatch_key`` or ``required``;
* ``state``: whether the token stays inside a name or value (``critical``) or not (``boundary``);
* ``next``: whether the grammar's frontier after the token can start a critical part.

A grammar family is one `TagVocabulary`; ids count through it in the order of Table 5, ``cls`` slowest.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

UNRESOLVED = -2
"""Stands in `Transition.tags` for a token that no marker explains: its action and floor are high (PASK 3.3)."""


class Tag(NamedTuple):
    """One structural tag z = (class, role, state, next), PASK Eq. 4."""

    cls: str
    role: str
    state: str
    next: str


@dataclass(frozen=True)
class TagVocabulary:
    """The values of the four tag fields of one grammar family (PASK Table 5).

    Fields:
        family: name of the grammar family, part of frozen policies.
        classes, roles, states, nexts: the values, in the order that fixes the ids.
        rest_state: the state of tokens that touch no name or value (``boundary`` for calls, ``stable`` for SQL).
    """

    family: str
    classes: tuple[str, ...]
    roles: tuple[str, ...]
    states: tuple[str, ...]
    nexts: tuple[str, ...]
    rest_state: str = "boundary"

    @property
    def size(self) -> int:
        """Number of distinct tags."""
        return len(self.classes) * len(self.roles) * len(self.states) * len(self.nexts)

    @cached_property
    def tags(self) -> tuple[Tag, ...]:
        """Every tag, in id order."""
        return tuple(Tag(c, r, s, n) for c in self.classes for r in self.roles for s in self.states for n in self.nexts)

    @cached_property
    def _ids(self) -> dict[Tag, int]:
        return {tag: i for i, tag in enumerate(self.tags)}

    def index(self, tag: Tag) -> int:
        """The id of `tag`, in [0, size). Raises KeyError for a tag outside the vocabulary."""
        return self._ids[tag]

    def tag(self, index: int) -> Tag:
        """The tag with id `index`. Raises IndexError outside [0, size)."""
        if not 0 <= index < self.size:
            raise IndexError(f"tag id {index} is outside [0, {self.size}) of the {self.family!r} vocabulary")
        return self.tags[index]


CALL_VOCABULARY = TagVocabulary(
    family="function_calling",
    classes=("pure_scaffold", "schema_bearing", "free_generation"),
    roles=("scaffold_separator", "required", "optional", "dispatch_key"),
    states=("boundary", "critical"),
    nexts=("lookahead_critical", "no_lookahead"),
)
"""The function-calling column of PASK Table 5: 3 x 4 x 2 x 2 = 48 tags."""

SQL_VOCABULARY = TagVocabulary(
    family="sql",
    classes=("pure_scaffold", "schema_bearing", "free_generation"),
    roles=("projection", "relation", "predicate", "outside_schema"),
    states=("stable", "boundary", "critical"),
    nexts=("lookahead_critical", "no_lookahead"),
    rest_state="stable",
)
"""The text-to-SQL column of PASK Table 5: 3 x 4 x 3 x 2 = 72 tags."""
