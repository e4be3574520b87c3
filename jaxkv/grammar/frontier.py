"""From XGrammar's parser states to the parts of the grammar that a token crosses (PASK B.1).

Every part of a sentence has its own rule, marked ``name[temperature=<int>]`` in the EBNF. A parser state then carries
``active_temperature_rule_id``, its innermost marked ancestor, which a `MarkerTable` turns into a `Marker`. The
frontier is the set of markers of all parser states. A token is fed byte by byte, so that every rule it crosses is
seen, and not only those at its two ends.

Which marker *consumed* a byte follows from the frontier before it: its markers, narrowed to those that could take
that byte (`Marker.consumes`), e.g. inside ``"Par`` the string's text takes ``i`` and the closing quote takes ``"``.
Where several remain, later bytes of the same token decide if they can (two keys with a common beginning); what stays
open is ambiguous, and all its candidates are kept.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import xgrammar

_ACTIVE = re.compile(r"active_temperature_rule_id=(\d+)")
_RULE = re.compile(r"^(\w+)(?:\[[^\]\n]*\])? ::=", re.MULTILINE)


@dataclass(frozen=True, eq=False)
class Marker:
    """One marked part of a grammar; compared by identity.

    Fields:
        kind: schema-independent name; the sorted kinds of a frontier are its parser state.
        cls, role: the first two fields of the tag of every token in this part.
        region: whether this part is a name or a value, so that a token can be inside it.
        critical: whether a frontier at the start of this region is ``lookahead_critical``.
        path: where in the schema, for messages; "" for parts shared by several places.
        expected: what the part accepts, in words, for messages.
        texts: all sentences of the part, if it is a choice of fixed texts; in lower case if `fold`.
        alphabet: the bytes that can occur, if it is open; None allows every byte.
        fold: whether ASCII letters of `texts` may be in either case.
        weak: whether the part gives way where a byte may as well belong to one that is not weak: the schema decides
            between a declared name and a name that anyone may make up (PASK B.1, "schema context").
    """

    kind: str
    cls: str
    role: str
    region: bool
    critical: bool = False
    path: str = ""
    expected: str = ""
    texts: frozenset[bytes] | None = None
    alphabet: frozenset[int] | None = None
    fold: bool = False
    weak: bool = False
    _prefixes: frozenset[bytes] = field(init=False, repr=False, default=frozenset())
    _unfinished: frozenset[bytes] = field(init=False, repr=False, default=frozenset())

    def __post_init__(self):
        if self.texts is not None:
            unfinished = frozenset(text[:i] for text in self.texts for i in range(1, len(text)))
            object.__setattr__(self, "_unfinished", unfinished)
            object.__setattr__(self, "_prefixes", unfinished | self.texts)

    def consumes(self, read: bytes, byte: int) -> bool:
        """Whether `byte` can follow `read` (what the part has consumed so far; empty for open parts)."""
        if self.texts is not None:
            return self.reads(read, byte) in self._prefixes
        return self.alphabet is None or byte in self.alphabet

    def reads(self, read: bytes, byte: int) -> bytes:
        """What the part has consumed after `byte`; empty for open parts."""
        if self.texts is None:
            return b""
        text = read + bytes((byte,))
        return text.lower() if self.fold else text

    def ends(self, read: bytes) -> bool:
        """Whether the part can end after `read`."""
        return self.texts is None or read in self.texts

    def goes_on(self, read: bytes) -> bool:
        """Whether the part can consume more after `read`."""
        return self.texts is None or read in self._unfinished


UNKNOWN = Marker("unresolved", "", "", False)
"""Explains bytes that no marker explains."""


class Frontier(NamedTuple):
    """The markers of all parser states; `unmarked` if some state has none."""

    markers: tuple[Marker, ...]
    unmarked: bool
    parser_state: str


class Progress(NamedTuple):
    """Where a tracer stands; immutable, so that a rollback is an assignment.

    `reading` maps each marker that consumed the newest byte and can go on to what it has read; `context` is the
    marker of the newest resolved byte.
    """

    frontier: Frontier
    reading: dict[Marker, bytes]
    context: Marker | None


class Crossing(NamedTuple):
    """What one token did: each marker it crossed with "it held the whole token", and the frontier it ended in."""

    markers: tuple[tuple[Marker, bool], ...]
    starts_critical: bool


class MarkerTable:
    """Rule ids of a compiled grammar -> markers, and frontiers of matchers of that grammar."""

    def __init__(self, grammar: xgrammar.Grammar, markers: dict[str, Marker]):
        # Compiling renumbers rules. The printed grammar lists them in the order of their ids; the JSON form also
        # does, but its size is quadratic in the number of rules (94 MB for 50 tools).
        names = _RULE.findall(str(grammar))
        self._markers = {i: markers[name] for i, name in enumerate(names) if name in markers}
        missing = set(markers) - set(names)
        if missing:
            raise AssertionError(f"marked rules {sorted(missing)} are absent from the compiled grammar")
        self._frontiers: dict[tuple[frozenset[str], bool], Frontier] = {}

    def read(self, matcher: xgrammar.GrammarMatcher) -> Frontier:
        """The current frontier of `matcher`; without markers once nothing can follow."""
        text = matcher._debug_print_internal_state()
        found = _ACTIVE.findall(text)
        key = (frozenset(found), text.count("ParserState(") > len(found))
        frontier = self._frontiers.get(key)
        if frontier is None:
            ids = sorted(int(i) for i in key[0])
            markers = tuple(self._markers[i] for i in ids if i in self._markers)
            unmarked = key[1] or len(markers) < len(ids)
            kinds = {m.kind for m in markers} | ({UNKNOWN.kind} if unmarked else set())
            frontier = self._frontiers[key] = Frontier(markers, unmarked, ",".join(sorted(kinds)))
        return frontier

    def start(self, matcher: xgrammar.GrammarMatcher) -> Progress:
        """The progress of a matcher that has consumed nothing."""
        return Progress(self.read(matcher), {}, None)

    def step(
        self, progress: Progress, byte: int, matcher: xgrammar.GrammarMatcher
    ) -> tuple[Progress, dict[Marker, bool]]:
        """Attribute `byte`, which `matcher` has just accepted.

        Returns:
            the progress after it, and the markers that may have consumed it, each with "it can end here".
        """
        before, reading, context = progress
        # A part that has ended may also begin anew.
        reading = {m: b"" if m.ends(read) and not m.consumes(read, byte) else read for m, read in reading.items()}
        candidates = [m for m in before.markers if m.consumes(reading.get(m, b""), byte)]
        if before.unmarked:
            # Schema context (PASK B.1): an unmarked state belongs to the part that came before it.
            candidates.append(context or UNKNOWN)
        if not candidates:
            candidates = list(before.markers) or [UNKNOWN]
        after = self.read(matcher)
        consumed, going_on = {}, {}
        for marker in candidates:
            read = marker.reads(reading.get(marker, b""), byte)
            consumed[marker] = marker.ends(read)
            if marker in after.markers and marker.goes_on(read):
                going_on[marker] = read
        return Progress(after, going_on, candidates[0] if len(candidates) == 1 else context), consumed


def cross(steps: Sequence[dict[Marker, bool]], progress: Progress) -> Crossing:
    """Resolve the markers that a token crossed.

    Args:
        steps: for each byte of the token, what `MarkerTable.step` returned.
        progress: where the tracer stands after it.
    """
    kept: list[set[Marker]] = [set(step) for step in steps]
    for i in range(len(kept) - 1, -1, -1):
        if i + 1 < len(kept):
            kept[i] = {m for m in kept[i] if _continues(m, steps[i], kept[i + 1])} or kept[i]
        kept[i] = {m for m in kept[i] if not m.weak} or kept[i]
    inside = set.intersection(*kept)
    crossed = dict.fromkeys(m for here in kept for m in here)
    starts = any(m.critical and m not in progress.reading for m in progress.frontier.markers)
    return Crossing(tuple((m, m in inside) for m in crossed), starts)


def _continues(marker: Marker, step: dict[Marker, bool], following: set[Marker]) -> bool:
    """Whether a parse in which `marker` took this byte can have gone on with one of `following`."""
    # A marker that was open beside this one did not follow it: neighbouring parts never overlap.
    return marker in following or (step[marker] and any(m not in step for m in following))
