"""Constraints: compiled grammars that mask logits, follow the tokens, and tag them.

A `Constraint` is compiled once for a grammar and a tokenizer and shared by any number of rows; each row has a
`Matcher`. All of this is host code. A step of the engine is ``fill_mask`` -> sample -> ``accept``; the tags of the
accepted token are in the `Transition`, in time for the token's KV, which only the next forward pass produces
(PASK 3.3).

A new grammar family is one file: it builds an EBNF with a `Marker` for each part and passes both, with its
`TagVocabulary`, to `GrammarConstraint`.

How a token's bytes become tags (design choices where the paper leaves them open):

* Each byte belongs to the part that consumed it; a token has one candidate tag for each part that it crossed.
* ``state`` is ``critical`` for a region (name or value) that held all bytes of the token. A token that crosses the
  edge of a region, entering or leaving it, is ``boundary`` in all its candidates. A token that touches no region has
  the vocabulary's ``rest_state``.
* ``next`` is ``lookahead_critical`` if the very next byte can be the first of a critical region; with
  `GrammarConstraint.past_blank` also the byte after one blank. Bytes that go on with a region already begun do not
  count.
* A byte that several parts may have consumed (after resolution by the later bytes of its token) gives a candidate for
  each.
* A token that no marker explains has the tags ``(UNRESOLVED,)``.
"""

from collections import OrderedDict
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import xgrammar

from jaxkv.errors import RequestError
from jaxkv.grammar.ebnf import GrammarBuilder
from jaxkv.grammar.frontier import UNKNOWN, Crossing, Marker, MarkerTable, Progress, cross
from jaxkv.grammar.tags import UNRESOLVED, Tag, TagVocabulary


class Transition(NamedTuple):
    """What an accepted token did.

    Fields:
        tags: ids of all candidate tags, ascending and unique; () for a stop token, ``(UNRESOLVED,)`` if no marker
            explains it.
        parser_state: the sorted kinds of the frontier after the token, joined by ","; the key of the reserve.
        terminated: whether the token was a stop token.
    """

    tags: tuple[int, ...]
    parser_state: str
    terminated: bool


class Acceptance(NamedTuple):
    """Whether a text is a sentence; if not, the character position of the first fault, and the reason with its path."""

    accepted: bool
    position: int
    reason: str


@runtime_checkable
class TokenizerLike(Protocol):
    """What a constraint needs to know of a tokenizer.

    Fields:
        vocab_size: size of the model's vocabulary, unused tail included.
        stop_ids: tokens that end a sentence.
        token_bytes: the bytes of each token; b"" for special and unused ones, which no grammar can produce.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    @property
    def token_bytes(self) -> tuple[bytes, ...]: ...


@runtime_checkable
class Constraint(Protocol):
    """What the engine and the policies ask of a constraint."""

    vocabulary: TagVocabulary

    def start(self) -> "Matcher":
        """A matcher at the start of a sentence, for one row."""
        ...

    def parse(self, text: str) -> list[dict]:
        """The calls (or rows) that a complete sentence stands for."""
        ...


class _Compiled(NamedTuple):
    tokenizer: TokenizerLike
    compiler: xgrammar.GrammarCompiler


_COMPILERS: OrderedDict[int, _Compiled] = OrderedDict()
_MAX_COMPILERS = 4
_CACHE_BYTES = 256 * 2**20


def compiler_of(tokenizer: TokenizerLike) -> xgrammar.GrammarCompiler:
    """The compiler of `tokenizer`, kept for the four newest tokenizers; it caches what it compiled, up to 256 MiB."""
    entry = _COMPILERS.get(id(tokenizer))
    if entry is None:
        vocabulary = list(tokenizer.token_bytes)
        # The model's vocabulary may be longer than the tokenizer's: tokens without bytes are special, hence always
        # masked.
        vocabulary += [b""] * (tokenizer.vocab_size - len(vocabulary))
        info = xgrammar.TokenizerInfo(
            vocabulary,
            xgrammar.VocabType.RAW,
            vocab_size=tokenizer.vocab_size,
            stop_token_ids=list(tokenizer.stop_ids),
        )
        compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_limit_bytes=_CACHE_BYTES)
        # The tokenizer is kept alive with its compiler, so that its id stays its own.
        entry = _COMPILERS[id(tokenizer)] = _Compiled(tokenizer, compiler)
        while len(_COMPILERS) > _MAX_COMPILERS:
            _COMPILERS.popitem(last=False)
    _COMPILERS.move_to_end(id(tokenizer))
    return entry.compiler


class GrammarConstraint:
    """A marked grammar compiled for a tokenizer; base of every grammar family.

    Args:
        grammar: rules and markers, the root first.
        vocabulary: the tag vocabulary of the family.
        tokenizer: see `TokenizerLike`.
    """

    whole = "the call"
    """What a sentence is called in messages."""
    past_blank = False
    """Whether ``next`` looks past one blank: in a language that puts blanks before names, the next token holds both."""

    def __init__(self, grammar: GrammarBuilder, vocabulary: TagVocabulary, tokenizer: TokenizerLike):
        self.vocabulary = vocabulary
        self.tokenizer = tokenizer
        self.ebnf = grammar.text()
        self._compiled = compiler_of(tokenizer).compile_grammar(self.ebnf)
        self.table = MarkerTable(self._compiled.grammar, grammar.markers)
        self.stop_ids = frozenset(tokenizer.stop_ids)
        self.stop_mask = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
        for stop in tokenizer.stop_ids:
            self.stop_mask.view(np.uint32)[stop // 32] |= np.uint32(1 << (stop % 32))
        # XGrammar leaves the bits of the last word that stand for no token as they come.
        unused = -tokenizer.vocab_size % 32
        self.last_word = np.uint32(0xFFFFFFFF >> unused).view(np.int32)
        self._tags: dict[tuple[Marker, bool, bool, bool], int] = {}

    def start(self) -> "Matcher":
        """A matcher at the start of a sentence, for one row."""
        return Matcher(self)

    def parse(self, text: str) -> list[dict]:
        """The calls (or rows) that a complete sentence stands for; families override it."""
        raise NotImplementedError

    def accepts(self, text: str) -> Acceptance:
        """Whether `text` is a complete sentence of the grammar."""
        matcher = self.matcher()
        progress = self.table.start(matcher)
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            return Acceptance(False, error.start, "a lone surrogate is not text")
        place = ""
        for i, byte in enumerate(data):
            here = progress
            if not matcher.accept_string(data[i : i + 1]):
                position = len(data[:i].decode(errors="ignore"))
                return Acceptance(False, position, self._reason(matcher, here, place, f"found {text[position]!r}"))
            progress, _ = self.table.step(progress, byte, matcher)
            place = next((m.path for m in progress.frontier.markers if m.path), place)
        if matcher.is_completed():
            return Acceptance(True, len(text), "")
        return Acceptance(False, len(text), self._reason(matcher, progress, place, "the text ends here"))

    def matcher(self) -> xgrammar.GrammarMatcher:
        """A bare XGrammar matcher of this grammar."""
        return xgrammar.GrammarMatcher(self._compiled)

    def tags_of(self, crossing: Crossing) -> tuple[int, ...]:
        """The candidate tags of a token, by the rules in the module's docstring."""
        touches = any(marker.region for marker, _ in crossing.markers)
        tags = {self._tag(marker, inside, touches, crossing.starts_critical) for marker, inside in crossing.markers}
        return (UNRESOLVED,) if UNRESOLVED in tags else tuple(sorted(tags))

    def _reason(self, matcher: xgrammar.GrammarMatcher, progress: Progress, place: str, found: str) -> str:
        markers = progress.frontier.markers
        place = next((m.path for m in markers if m.path), place) or self.whole
        expected = " or ".join(dict.fromkeys(m.expected for m in markers if m.expected)) or "the end"
        following = bytes(b for b in range(256) if _can_follow(matcher, b))
        shown = f" (next: {following.decode()!r})" if following.isascii() and 0 < len(following) <= 12 else ""
        return f"{place}: expected {expected}{shown}, {found}"

    def _tag(self, marker: Marker, inside: bool, touches: bool, starts_critical: bool) -> int:
        key = (marker, inside, touches, starts_critical)
        tag = self._tags.get(key)
        if tag is None:
            if marker is UNKNOWN:
                return UNRESOLVED
            state = "boundary" if touches else self.vocabulary.rest_state
            if marker.region and inside:
                state = "critical"
            following = "lookahead_critical" if starts_critical else "no_lookahead"
            tag = self._tags[key] = self.vocabulary.index(Tag(marker.cls, marker.role, state, following))
        return tag


def _can_follow(matcher: xgrammar.GrammarMatcher, byte: int) -> bool:
    if not matcher.accept_string(bytes((byte,))):
        return False
    matcher.rollback(1)
    return True


class _Undo(NamedTuple):
    steps: int
    progress: Progress
    terminated: bool


class Matcher:
    """Follows one row through a constraint's grammar.

    One XGrammar matcher serves both the mask and the tags: it is fed byte by byte, which leaves it in the same state as
    whole tokens do.
    """

    def __init__(self, constraint: GrammarConstraint):
        self.constraint = constraint
        self._matcher = constraint.matcher()
        self._progress = constraint.table.start(self._matcher)
        self._terminated = False
        self._history: list[_Undo] = []

    @property
    def terminated(self) -> bool:
        """Whether a stop token was accepted."""
        return self._terminated

    @property
    def parser_state(self) -> str:
        """The sorted marker kinds of the frontier, joined by ","; "" where nothing but a stop token can follow."""
        return self._progress.frontier.parser_state

    @property
    def tokens(self) -> int:
        """Number of accepted tokens, the stop token included."""
        return len(self._history)

    def accept(self, token_id: int) -> Transition:
        """Advance by one token.

        Raises:
            RequestError: the grammar does not allow the token here, or the sentence has ended; the matcher is
                unchanged.
        """
        constraint, token_id = self.constraint, int(token_id)
        if self._terminated:
            raise RequestError(
                f"token {token_id} after the stop token: the sentence has ended; roll back or start a new matcher"
            )
        undo = _Undo(1, self._progress, self._terminated)
        if token_id in constraint.stop_ids:
            if not self._matcher.accept_token(token_id):
                raise RequestError(f"stop token {token_id} at token {self.tokens}: the sentence is not complete")
            self._terminated = True
            self._progress = Progress(constraint.table.read(self._matcher), {}, None)
            self._history.append(undo)
            return Transition((), self.parser_state, True)
        data = constraint.tokenizer.token_bytes[token_id] if self._is_text(token_id) else b""
        if not data:
            raise RequestError(
                f"token {token_id} at token {self.tokens}: a special or unused token is never part of a sentence"
            )
        progress, steps = self._progress, []
        for i, byte in enumerate(data):
            if not self._matcher.accept_string(data[i : i + 1]):
                if i:
                    self._matcher.rollback(i)
                raise RequestError(
                    f"token {token_id} ({data!r}) at token {self.tokens}: the grammar does not allow byte {i} here; "
                    "sample under the mask of fill_mask"
                )
            progress, consumed = constraint.table.step(progress, byte, self._matcher)
            steps.append(consumed)
        self._progress = progress
        self._history.append(undo._replace(steps=len(data)))
        crossing = cross(steps, progress)
        if constraint.past_blank and not crossing.starts_critical:
            crossing = crossing._replace(starts_critical=self._starts_critical_after_blank())
        return Transition(constraint.tags_of(crossing), self.parser_state, False)

    def fill_mask(self, mask: np.ndarray) -> None:
        """Write the permitted tokens into `mask`, int32 [ceil(V/32)], bit i % 32 of word i // 32 for token i.

        Unused ids beyond the tokenizer's vocabulary are never permitted. A stop token is permitted exactly when the
        sentence is complete; after one, the stop tokens alone are.
        """
        if mask.dtype != np.int32 or mask.shape != self.constraint.stop_mask.shape:
            raise RequestError(
                f"mask of {mask.dtype} {mask.shape}: expected int32 {self.constraint.stop_mask.shape}, a bit a token"
            )
        if self._terminated:
            mask[:] = self.constraint.stop_mask
        else:
            self._matcher.fill_next_token_bitmask(mask[None])
            mask[-1] &= self.constraint.last_word

    def rollback(self, tokens: int) -> None:
        """Undo the newest `tokens` tokens, stop token included; masks, frontiers and later tags are as if they never
        came.

        Raises:
            RequestError: fewer tokens were accepted, or `tokens` is negative.
        """
        if not 0 <= tokens <= len(self._history):
            raise RequestError(f"rollback of {tokens} tokens: {len(self._history)} were accepted")
        if not tokens:
            return
        undone = self._history[-tokens:]
        del self._history[-tokens:]
        self._matcher.rollback(sum(undo.steps for undo in undone))
        _, self._progress, self._terminated = undone[0]

    def _starts_critical_after_blank(self) -> bool:
        if not self._matcher.accept_string(b" "):
            return False
        markers = self.constraint.table.read(self._matcher).markers
        self._matcher.rollback(1)
        # A part that can hold the blank itself (a name of two words, a text) goes on and does not start.
        return any(m.critical and m not in self._progress.frontier.markers for m in markers)

    def _is_text(self, token_id: int) -> bool:
        return 0 <= token_id < len(self.constraint.tokenizer.token_bytes)
