"""A short notation for SQL rules, and the two lexical rules that a grammar makes from lists of words.

In a rule's body a word in capitals is a keyword, ``_`` one blank, ``~`` an optional blank, ``'...'`` a
text; all else is EBNF. A blank before a rule's name becomes part of a helper rule, ``_ expr`` of ``gap_expr`` and
``~ expr`` of ``opt_expr``, for the sake of masks: a blank in a rule of its own would leave every token that begins with
a blank undecided when masks are compiled (milliseconds a mask), and one written out in every body would be compiled for
every body (half of all tokens begin with a blank; 2.4 s instead of 12 s for a schema of 7 tables).
"""

import re
from collections.abc import Callable, Iterable
from typing import Final

from jaxkv.grammar.ebnf import literal

_PIECE: Final = re.compile(r"'[^']*'|[A-Z][A-Z_]*|[^\s]+")
_NAMES: Final = {"(": "LP", ")": "RP", ",": "COMMA", "*": "STAR", "-": "MINUS", ";": "SEMICOLON"}


def expand(body: str, word: Callable[[str], str] | None = None) -> tuple[str, dict[str, str]]:
    """A body in the short notation as XGrammar's EBNF, with the helper rules that it refers to, name to body.

    `word` gives the rule of a keyword; a blank before the keyword is part of it. Without it keywords are written out.
    """
    written, helpers, blank = [], {}, ""
    for piece in _PIECE.findall(body):
        if piece in ("~", "_"):
            blank = piece
            continue
        element = piece
        if piece.startswith("'"):
            element = literal(piece[1:-1])
        elif _is_keyword(piece):
            element = keyword(piece) if word is None else word(f" {piece}" if blank == "_" else piece)
        if _is_keyword(piece) and blank == "_":
            element = element if word else f'" " {element}'
        elif blank:
            name = _NAMES[piece[1:-1]] if piece.startswith("'") else element
            helpers[f"gap_{name}"] = f'" " {element}'
            if blank == "~":
                helpers[f"opt_{name}"] = f"{element} | gap_{name}"
            element = f"{'opt' if blank == '~' else 'gap'}_{name}"
        written.append(element)
        blank = ""
    return " ".join(written), helpers


def keyword(word: str) -> str:
    """`word` in capitals or in small letters, as one element."""
    return f"({literal(word.upper())} | {literal(word.lower())})"


def name_in_any_case(name: str) -> str:
    """A schema's name in any case: SQLite folds the ASCII letters of names."""
    parts = re.findall(r"[A-Za-z]|[^A-Za-z]+", name)
    return " ".join(
        f"[{part.lower()}{part.upper()}]" if len(part) == 1 and part.isascii() and part.isalpha() else literal(part)
        for part in parts
    )


def identifier_except(words: Iterable[str]) -> str:
    """ASCII identifiers that are none of `words` in any case, as one body."""
    return _without(sorted({word.lower() for word in words}), 0)


def _without(words: list[str], depth: int) -> str:
    """What may follow a prefix of `depth` characters that all of `words` share."""
    following = {word[depth] for word in words if len(word) > depth}
    rest = "[A-Za-z0-9_]"
    first = "abcdefghijklmnopqrstuvwxyz_" if not depth else "abcdefghijklmnopqrstuvwxyz0123456789_"
    others = "".join(c + c.upper() if c.isalpha() else c for c in first if c not in following)
    options = [f"[{others}] {rest}*"] if others else []
    for character in sorted(following):
        inner = [word for word in words if len(word) > depth and word[depth] == character]
        head = f"[{character}{character.upper()}]" if character.isalpha() else literal(character)
        options.append(f"{head} ({_without(inner, depth + 1)})")
    if depth and not any(len(word) == depth for word in words):
        options.append('""')
    return " | ".join(options)


def _is_keyword(piece: str) -> bool:
    return re.fullmatch(r"[A-Z][A-Z_]*", piece) is not None
