"""Structural tags of SQL, token by token, against tables written by hand from PASK Table 5 and its reading here."""

import pytest
from sql_toy import DDL, TOKENIZER

from jaxkv.grammar import SQL_VOCABULARY, SqlQueries, Tag

QUERIES = SqlQueries(DDL, TOKENIZER)
NAMES = {
    "pure": "pure_scaffold", "schema": "schema_bearing", "free": "free_generation",
    "pro": "projection", "rel": "relation", "pre": "predicate", "out": "outside_schema",
    "look": "lookahead_critical", "no": "no_lookahead",
}  # fmt: skip


def tags(text: str) -> set[Tag]:
    """'schema pro critical no | ...' -> tags."""
    return {Tag(*(NAMES.get(word, word) for word in part.split())) for part in text.split(" | ")}


def check(table):
    matcher = QUERIES.start()
    for text, expected in table:
        transition = matcher.accept(TOKENIZER.ids[text.encode()])
        assert {SQL_VOCABULARY.tag(i) for i in transition.tags} == tags(expected), text
    return matcher


ENTERS, NAME = "pure pro boundary no | schema pro boundary no", "schema pro critical no"


def test_select_from_where_token_by_token():
    matcher = check([
        ("SELECT", "pure pro stable look"),
        (" name", ENTERS),
        (",", "pure pro stable look"),
        (" T1", "pure pro stable no | free pro stable no"),
        (".id", ENTERS),
        (" FROM", "pure rel stable look"),
        (" customers", "pure rel boundary no | schema rel boundary no"),
        (" AS", "pure rel stable no"),
        (" T1", "pure rel stable no | free rel stable no"),
        (" WHERE", "pure pre stable look"),
        (" T1", "pure pre stable no | free pre stable no"),
        (".", "pure pre stable look"),
        ("city", "schema pre critical no"),
        (" =", "pure pre stable look"),
        (" '", "pure pre stable no"),
        ("abc", "free pre critical no"),
        ("'", "pure pre stable no"),
        (" AND", "pure pre stable look"),
        (" id", "pure pre boundary no | schema pre boundary no"),
        (" >=", "pure pre stable look"),
        (" 1", "pure pre boundary no | free pre boundary no"),
        (";", "pure out stable no"),
    ])  # fmt: skip
    assert matcher.accept(TOKENIZER.stop_ids[0]) == ((), "", True)


def test_joins_groups_orders_and_limits():
    check([
        ("SELECT", "pure pro stable look"),
        (" COUNT", "pure pro stable no"),
        ("(", "pure pro stable look"),
        ("*", "pure pro stable no"),
        (")", "pure pro stable no"),
        (" AS", "pure pro stable no"),
        (" x", "pure pro stable no | free pro stable no"),
        (" FROM", "pure rel stable look"),
        (" big", "pure rel boundary no | schema rel boundary no"),
        (" JOIN", "pure rel stable look"),
        (" orders", "pure rel boundary no | schema rel boundary no"),
        (" ON", "pure pre stable look"),
        (" ", "pure pre stable look"),
        ("orders.", "schema pre boundary look | pure pre boundary look"),
        ("id", "schema pre critical no"),
        (" =", "pure pre stable look"),
        ("big.", "schema pre boundary look | pure pre boundary look"),
        ("order_id", "schema pre critical no"),
        (" GROUP", "pure pre stable no"),
        (" BY", "pure pre stable look"),
        (" city", "pure pre boundary no | schema pre boundary no"),
        (" HAVING", "pure pre stable look"),
        (" SUM", "pure pre stable no"),
        ("(", "pure pre stable look"),
        ("id", "schema pre critical no"),
        (")", "pure pre stable no"),
        (" =", "pure pre stable look"),
        (" 1", "pure pre boundary no | free pre boundary no"),
        (" ORDER", "pure pre stable no"),
        (" BY", "pure pre stable look"),
        (" x", "pure pre stable no | free pre stable no"),
        (" DESC", "pure pre stable no"),
        (" LIMIT", "pure pre stable no"),
        (" 1", "pure pre boundary no | free pre boundary no"),
        (" ;", "pure out stable no"),
    ])  # fmt: skip


def test_a_sub_query_starts_anew_and_its_parentheses_belong_to_the_clause_around_it():
    check([
        ("SELECT", "pure pro stable look"),
        (" id", ENTERS),
        (" FROM", "pure rel stable look"),
        (" orders", "pure rel boundary no | schema rel boundary no"),
        (" WHERE", "pure pre stable look"),
        (" id", "pure pre boundary no | schema pre boundary no"),
        (" IN", "pure pre stable no | pure out stable no"),  # or the beginning of INTERSECT
        ("(", "pure pre stable look"),
        ("SELECT", "pure pro stable look"),
        (" id", ENTERS),
        (" FROM", "pure rel stable look"),
        (" big", "pure rel boundary no | schema rel boundary no"),
        (")", "pure pre stable no"),
    ])  # fmt: skip


def test_quoted_names_texts_and_set_operators():
    check([
        ("SELECT", "pure pro stable look"),
        (" id", ENTERS),
        (" FROM", "pure rel stable look"),
        (" `", "pure rel stable look"),
        ("line items", "schema rel critical no"),
        ("`", "pure rel stable no"),
        (" WHERE", "pure pre stable look"),
        (" \"", "pure pre stable look"),
        ("unit;price", "schema pre critical no"),
        ('"', "pure pre stable no"),
        (" =", "pure pre stable look"),
        (" \"", "pure pre stable look"),
        ("abc", "free pre critical no"),
        ('"', "pure pre stable no"),
        (" UNION", "pure out stable no"),
        (" ALL", "pure out stable no"),
        (" SELECT", "pure pro stable look | pure out stable look"),
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("before", "token", "expected"),
    [
        # A function and a column of one name part at the parenthesis.
        ("SELECT ", "total", "schema pro critical no | pure pro boundary no"),
        # The beginning of a name counts as the schema's; where it parts from all names, it is an alias.
        ("SELECT ", "customer", "schema pro critical no"),
        ("SELECT ", "T1", "free pro stable no"),
        ("SELECT ", "COUNT", "pure pro stable no"),
        ("SELECT T1.", "name", "schema pro critical no"),
        ("SELECT id FROM big ", "T1", "free rel stable no"),
        ("SELECT id FROM (", "SELECT", "pure pro stable look"),
        ("WITH ", "x", "free out stable no"),
        ("SELECT id FROM big WHERE id = ", "12", "free pre critical no"),
        ("SELECT id FROM big WHERE id = 1", "2", "free pre critical no"),
    ],
)
def test_one_token(before, token, expected):
    matcher = QUERIES.start()
    for byte in before.encode():
        matcher.accept(byte)
    got = {SQL_VOCABULARY.tag(i) for i in matcher.accept(TOKENIZER.ids[token.encode()]).tags}
    assert got == tags(expected)


def test_parser_states_name_clauses_and_parts_and_not_the_schema():
    matcher = QUERIES.start()
    for byte in b"SELECT T1.":
        matcher.accept(byte)
    assert matcher.parser_state == "projection.alias,projection.column,select.scaffold"
    for byte in b"id FROM ":
        matcher.accept(byte)
    assert matcher.parser_state == "from.scaffold,relation.table"


def test_the_vocabulary_counts_through_table_5():
    assert SQL_VOCABULARY.size == len(set(SQL_VOCABULARY.tags)) == 72
    assert SQL_VOCABULARY.tag(0) == tags("pure pro stable look").pop()
    assert SQL_VOCABULARY.tag(71) == tags("free out critical no").pop()
