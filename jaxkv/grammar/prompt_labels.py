"""Semantic labels of prompt text (PASK A.3, Table 6): what of a tool schema or a table definition a byte belongs to.

Everything is protected content until a span is recognised. A span is a JSON value in the prompt, however it is
indented, spaced or escaped, that is a function document or a list of them; or a `CREATE TABLE` statement that SQLite
accepts. Inside, the parts get their labels and the rest is schema scaffold. What is not valid keeps the default.

A token that crosses labels keeps all of them, in the order of `PROMPT_LABELS`; the policy resolves it conservatively.
"""

import json
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Int8

PROMPT_LABELS: Final = (
    "protected_content",
    "schema_scaffold",
    "function_name",
    "parameter_key",
    "type_constraint",
    "enum_constraint",
    "schema_description",
)
_CONTENT, _SCAFFOLD, _NAME, _KEY, _TYPE, _ENUM, _DESCRIPTION = range(len(PROMPT_LABELS))

_SPACE: Final = re.compile(r"[ \t\r\n]*")
_STRING: Final = re.compile(r'"((?:[^"\\]|\\.)*)"', re.S)
_ATOM: Final = re.compile(r"[^\s,\[\]{}]+")
_CREATE: Final = re.compile(r"\bCREATE\s+TABLE\b", re.I)
# Words of SQLite's grammar that constrain a column or a table, not names.
_CONSTRAINTS: Final = frozenset(
    [
        "primary",
        "key",
        "foreign",
        "references",
        "not",
        "null",
        "unique",
        "check",
        "default",
        "collate",
        "autoincrement",
        "constraint",
        "on",
        "delete",
        "update",
        "cascade",
        "restrict",
        "set",
        "no",
        "action",
        "asc",
        "desc",
        "generated",
        "always",
        "stored",
        "virtual",
        "deferrable",
        "initially",
        "deferred",
        "immediate",
        "match",
        "conflict",
        "rollback",
        "abort",
        "fail",
        "ignore",
        "replace",
        "as",
    ]
)
_TABLE_CONSTRAINT: Final = frozenset(["constraint", "primary", "foreign", "unique", "check"])
_SQL_TOKEN: Final = re.compile(
    r"""(?P<comment>--[^\n]*|/\*.*?\*/)|(?P<quoted>"(?:[^"]|"")*"|`(?:[^`]|``)*`|\[[^\]]*\])|(?P<text>'(?:[^']|'')*')"""
    r"""|(?P<word>[^\W\d]\w*)|(?P<number>\d[\w.]*)|(?P<mark>\S)""",
    re.S,
)


class Span(NamedTuple):
    """Characters [start, stop) of a text and the number of their label."""

    start: int
    stop: int
    label: int


def label_text(text: str) -> Int8[np.ndarray, "n"]:
    """The label of every character of a prompt."""
    labels = np.full(len(text), _CONTENT, np.int8)
    for span in [*_json_spans(text), *_ddl_spans(text)]:
        labels[span.start : span.stop] = span.label
    return labels


def label_tokens(pieces: Sequence[bytes]) -> tuple[tuple[int, ...], ...]:
    """The candidate labels of every token of a prompt, given each token's bytes.

    A token without bytes is protected content.
    """
    whole = b"".join(pieces)
    text = whole.decode("utf-8", errors="replace")
    labels = label_text(text)
    if len(text) != len(whole):  # one character is several bytes, and a token may end inside of one
        try:
            sizes = [len(character.encode()) for character in whole.decode("utf-8")]
        except UnicodeDecodeError:
            return ((_CONTENT,),) * len(pieces)
        labels = np.repeat(labels, sizes)
    found, start = [], 0
    for piece in pieces:
        inside = labels[start : start + len(piece)]
        found.append(tuple(int(label) for label in np.unique(inside)) or (_CONTENT,))
        start += len(piece)
    return tuple(found)


def _json_spans(text: str) -> Iterator[Span]:
    """Labelled spans of all function documents in a text."""
    decoder = json.JSONDecoder()
    at = 0
    while (start := _next_opening(text, at)) >= 0:
        try:
            value, stop = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            at = start + 1
            continue
        if not _is_schema(value):
            at = start + 1
            continue
        yield Span(start, stop, _SCAFFOLD)
        yield from _Walk(text).value(start, ())[1]
        at = stop


def _next_opening(text: str, at: int) -> int:
    found = [place for place in (text.find("{", at), text.find("[", at)) if place >= 0]
    return min(found, default=-1)


def _is_schema(value: Any) -> bool:
    """A function document, plain or wrapped as OpenAI does, or a list of them."""
    if isinstance(value, list):
        return bool(value) and all(map(_is_schema, value))
    if not isinstance(value, Mapping):
        return False
    function = value.get("function", value)
    return (
        isinstance(function, Mapping)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("parameters"), Mapping)
    )


class _Walk:
    """Reads valid JSON once more, with positions; a path is made of keys, and of None for each list around."""

    def __init__(self, text: str) -> None:
        self.text = text

    def skip(self, at: int) -> int:
        found = _SPACE.match(self.text, at)
        assert found is not None, "the pattern matches nothing, too"
        return found.end()

    def string(self, at: int) -> tuple[int, int, int]:
        """Where the content of a string begins and ends, and what comes after its closing quote."""
        found = _STRING.match(self.text, at)
        assert found is not None, "the JSON decoder has accepted it"
        return found.start(1), found.end(1), found.end()

    def names_parameters(self, at: int, path: tuple[str | None, ...]) -> bool:
        """Whether the keys of the object at `at` name parameters.

        They do under `properties`, at any depth, and directly under `parameters` where a document is written in short:
        each parameter by itself, no JSON schema around them.
        """
        inside = _document(path)
        if inside[:1] != ("parameters",):
            return False
        if len(inside) > 1:
            return inside[-1] == "properties"
        schema, _ = json.JSONDecoder().raw_decode(self.text, at)
        return "properties" not in schema and not isinstance(schema.get("type"), str)

    def value(self, at: int, path: tuple[str | None, ...]) -> tuple[int, list[Span]]:
        """The end of the value at `at`, and its labelled spans."""
        at, spans = self.skip(at), []
        opening = self.text[at]
        if opening in "{[":
            closing_mark = "}" if opening == "{" else "]"
            names = opening == "{" and self.names_parameters(at, path)
            at = self.skip(at + 1)
            while self.text[at] != closing_mark:
                inner = (*path, None)
                if opening == "{":
                    start, stop, at = self.string(at)
                    key = json.loads(f'"{self.text[start:stop]}"')
                    if names:
                        spans.append(Span(start, stop, _KEY))
                    at = self.skip(self.skip(at) + 1)  # the colon
                    inner = (*path, key)
                at, found = self.value(at, inner)
                spans += found
                at = self.skip(at)
                if self.text[at] == ",":
                    at = self.skip(at + 1)
            return at + 1, spans
        if opening == '"':
            start, stop, after = self.string(at)
        else:
            found = _ATOM.match(self.text, at)
            assert found is not None, "the JSON decoder has accepted it"
            start, stop, after = found.start(), found.end(), found.end()
        label = _label(path)
        return after, [] if label is None else [Span(start, stop, label)]


def _document(path: tuple[str | None, ...]) -> tuple[str | None, ...]:
    """The path inside its function document: lists around it and OpenAI's wrapper left out."""
    while path and path[0] is None:
        path = path[1:]
    return path[1:] if path[:1] == ("function",) else path


def _label(path: tuple[str | None, ...]) -> int | None:
    """The label of the string, number or word at `path`, or None for scaffold."""
    inside = _document(path)
    if inside == ("name",):
        return _NAME
    keys = [key for key in inside if key is not None]
    if not keys:
        return None
    if keys[-1] == "description":
        return _DESCRIPTION
    if keys[-1] == "type" and inside != ("type",):
        return _TYPE
    if keys[-1] == "enum" and inside[-1] is None:
        return _ENUM
    if keys[-1] == "required" and inside[-1] is None:
        return _KEY
    return None


def _ddl_spans(text: str) -> Iterator[Span]:
    """Labelled spans of all table definitions in a text."""
    at = 0
    while found := _CREATE.search(text, at):
        stop = _statement_end(text, found.start())
        if stop is None or not _is_table(text[found.start() : stop]):
            at = found.end()
            continue
        yield Span(found.start(), stop, _SCAFFOLD)
        yield from _table_spans(text, found.start(), stop)
        at = stop


def _statement_end(text: str, start: int) -> int | None:
    """The end of a CREATE TABLE statement: behind its semicolon, or behind the parenthesis that closes the columns."""
    depth, closed = 0, None
    for token in _SQL_TOKEN.finditer(text, start):
        mark = token["mark"]
        if mark == "(":
            depth += 1
        elif mark == ")":
            depth -= 1
            if depth == 0:
                closed = token.end()
            elif depth < 0:
                return closed
        elif depth == 0 and closed is not None:
            if mark == ";":
                return token.end()
            if (token["word"] or "").lower() not in ("without", "rowid", "strict") and mark != ",":
                return closed
    return closed


def _is_table(statement: str) -> bool:
    """Whether SQLite accepts a statement as a table definition, in an empty database in memory."""
    try:
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.execute(statement)
    except (sqlite3.Error, sqlite3.Warning, ValueError):
        return False
    return True


def _table_spans(text: str, start: int, stop: int) -> Iterator[Span]:
    """Table name, columns, declared types, constraints and comments of a valid table definition."""
    depth, place = 0, "head"
    for token in _SQL_TOKEN.finditer(text, start, stop):
        word = (token["word"] or "").lower()
        if token["comment"]:
            yield Span(token.start(), token.end(), _DESCRIPTION)
            continue
        mark = token["mark"]
        if mark == "(":
            depth += 1
            if depth == 1:
                place = "column"
            continue
        if mark == ")":
            depth -= 1
            continue
        if mark == "," and depth == 1:
            place = "column"
            continue
        name = token["quoted"] or (token["word"] and token["word"])
        if depth == 0:
            if name and place == "head" and word not in ("create", "table", "if", "not", "exists", "temp", "temporary"):
                yield _inside(token, _NAME)
            continue
        if place == "column" and depth == 1 and name:
            if word in _TABLE_CONSTRAINT and not token["quoted"]:
                place = "constraint"
            else:
                yield _inside(token, _KEY)
                place = "type"
                continue
        if word in _CONSTRAINTS and not token["quoted"]:
            yield Span(token.start(), token.end(), _ENUM)
            place = "reference" if word == "references" else "constraint"
        elif place == "type" and (name or token["number"]):
            yield Span(token.start(), token.end(), _TYPE)
        elif place == "reference" and name and depth == 1:
            yield _inside(token, _NAME)
            place = "constraint"
        elif place == "constraint" and name and depth == 2:
            yield _inside(token, _KEY)


def _inside(token: re.Match[str], label: int) -> Span:
    """A name without its quotes."""
    quoted = 1 if token["quoted"] else 0
    return Span(token.start() + quoted, token.end() - quoted, label)
