"""Labels of prompt text: each part of JSON function documents and of table definitions, however they are written."""

import itertools
import json

import numpy as np
import pytest

from jaxkv.evaluation import bfcl
from jaxkv.grammar.prompt_labels import PROMPT_LABELS, label_text, label_tokens

TOOL = {
    "name": "book_table",
    "description": 'Book a "quiet" table.',
    "parameters": {
        "type": "object",
        "properties": {
            "size": {"type": "integer", "description": "Guests", "minimum": 1},
            "type": {"type": "string", "enum": ["inside", "terrace"]},
            "guest": {"type": "object", "properties": {"name": {"type": ["string", "null"]}}, "required": ["name"]},
        },
        "required": ["size", "type"],
    },
}
EXPECTED = [
    ("function_name", "book_table"),
    ("schema_description", 'Book a \\"quiet\\" table.'),
    ("type_constraint", "object"),
    ("parameter_key", "size"),
    ("type_constraint", "integer"),
    ("schema_description", "Guests"),
    ("parameter_key", "type"),
    ("type_constraint", "string"),
    ("enum_constraint", "inside"),
    ("enum_constraint", "terrace"),
    ("parameter_key", "guest"),
    ("type_constraint", "object"),
    ("parameter_key", "name"),
    ("type_constraint", "string"),
    ("type_constraint", "null"),
    ("parameter_key", "name"),
    ("parameter_key", "size"),
    ("parameter_key", "type"),
]
QUIET = ("protected_content", "schema_scaffold")


def runs(text):
    """(label, text) of each stretch of equal labels, content and scaffold left out."""
    labels = label_text(text)
    cuts = [0, *(np.flatnonzero(np.diff(labels)) + 1), len(text)]
    found = [(PROMPT_LABELS[labels[a]], text[a:b]) for a, b in itertools.pairwise(cuts)]
    return [run for run in found if run[0] not in QUIET]


@pytest.mark.parametrize(
    "written",
    [
        json.dumps(TOOL),
        json.dumps(TOOL, indent=4),
        json.dumps(TOOL, separators=(",", ":")),
        json.dumps([TOOL]),
        json.dumps({"type": "function", "function": TOOL}),
        json.dumps([{"type": "function", "function": TOOL}], indent=2),
    ],
)
def test_parts_of_a_function_document(written):
    text = f"Be brief. Tools: <tools>\n{written}\n</tools> How {{many}} [guests]?"
    assert runs(text) == EXPECTED
    labels = label_text(text)
    start = text.index(written)
    assert (labels[:start] == 0).all()
    assert (labels[start + len(written) :] == 0).all()
    assert (labels[start : start + len(written)] != 0).all(), "inside a span, all else is scaffold"


def test_the_short_form_names_its_parameters_directly():
    short = {"name": "f", "description": "d", "parameters": {"unit": {"type": "string", "enum": ["C"]}}, "required": []}
    assert runs(json.dumps(short)) == [
        ("function_name", "f"),
        ("schema_description", "d"),
        ("parameter_key", "unit"),
        ("type_constraint", "string"),
        ("enum_constraint", "C"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f"}',
        "[1, 2]",
        '{"name": "f", "parameters": {',
        '{"a": {"b": []}}',
        "",
        "{" * 5000,
        '{"name": 1, "parameters": {}}',
    ],
)
def test_what_is_no_function_document_is_content(text):
    assert (label_text(text) == 0).all()


def test_a_document_inside_broken_json_is_found():
    assert runs('{"broken": ' + json.dumps(TOOL)) == EXPECTED


def test_every_bfcl_prompt_labels_its_functions_and_nothing_of_the_question():
    for category in ("simple_python", "parallel_multiple", "live_multiple"):
        for case in bfcl.load(category, stride=25):
            (text,) = [message["content"] for message in case.messages if message["role"] == "user"]
            found = runs(text)
            names = [part for label, part in found if label == "function_name"]
            assert names == [tool["name"] for tool in case.tools], case.id
            question = text.rindex("Question: ")
            assert (label_text(text)[question:] == 0).all() or "{" in text[question:], case.id


DDL = """CREATE TABLE "river basin" (
  id INTEGER PRIMARY KEY, -- the number
  name VARCHAR(40) NOT NULL DEFAULT 'none',
  [source state] TEXT REFERENCES state(state_name) ON DELETE CASCADE,
  UNIQUE (name, id)
);"""


def test_parts_of_a_table_definition():
    text = f"Schema:\n{DDL}\nHow many rivers? CREATE TABLE is a statement."
    found = runs(text)
    assert found == [
        ("function_name", "river basin"),
        ("parameter_key", "id"),
        ("type_constraint", "INTEGER"),
        ("enum_constraint", "PRIMARY"),
        ("enum_constraint", "KEY"),
        ("schema_description", "-- the number"),
        ("parameter_key", "name"),
        ("type_constraint", "VARCHAR"),
        ("type_constraint", "40"),
        ("enum_constraint", "NOT"),
        ("enum_constraint", "NULL"),
        ("enum_constraint", "DEFAULT"),
        ("parameter_key", "source state"),
        ("type_constraint", "TEXT"),
        ("enum_constraint", "REFERENCES"),
        ("function_name", "state"),
        ("parameter_key", "state_name"),
        ("enum_constraint", "ON"),
        ("enum_constraint", "DELETE"),
        ("enum_constraint", "CASCADE"),
        ("enum_constraint", "UNIQUE"),
        ("parameter_key", "name"),
        ("parameter_key", "id"),
    ]
    labels = label_text(text)
    start = text.index(DDL)
    assert (labels[:start] == 0).all()
    assert (labels[start + len(DDL) :] == 0).all()


@pytest.mark.parametrize(
    "text", ["CREATE TABLE t (a INTEGER", "CREATE TABLE t (a,, b)", "please CREATE TABLE now", "CREATE TABLE"]
)
def test_an_invalid_definition_is_content(text):
    assert (label_text(text) == 0).all()


def test_definitions_without_semicolons_and_several_of_them():
    text = "CREATE TABLE a (x INT) CREATE TABLE b (y INT, PRIMARY KEY (y)) and a question"
    assert [part for label, part in runs(text) if label == "function_name"] == ["a", "b"]
    assert (label_text(text)[text.index(" and") :] == 0).all()


def test_tokens_that_cross_labels_keep_all_of_them():
    text = json.dumps({"name": "fé", "parameters": {}}, ensure_ascii=False)
    whole = text.encode()
    number = {name: i for i, name in enumerate(PROMPT_LABELS)}
    at = whole.index("é".encode()) + 1  # in the middle of a character
    pieces = [b"Hi ", whole[:8], whole[8:at], whole[at:], b""]
    content, scaffold, name = (number[label] for label in ("protected_content", "schema_scaffold", "function_name"))
    assert label_tokens(pieces) == ((content,), (scaffold,), (scaffold, name), (scaffold, name), (content,))
    assert label_tokens([b"\xff", b"{"]) == ((content,), (content,))
    assert label_tokens([]) == ()
