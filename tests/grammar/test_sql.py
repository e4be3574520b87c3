"""SQL queries: schemas, what is accepted, masks, rollback, and that SQLite can read what the grammar writes."""

import sqlite3

import numpy as np
import pytest
import xgrammar
from sql_toy import DDL, TOKENIZER, walk_query
from toy_grammar import permitted

import jaxkv
from jaxkv.errors import RequestError, SchemaError
from jaxkv.grammar import SQL_VOCABULARY, Constraint, SqlQueries
from jaxkv.grammar.sql_schema import read_schema
from jaxkv.policies.pask.frozen_policy import GRAMMARS

QUERIES = SqlQueries(DDL, TOKENIZER)
UNMARKED = SqlQueries(DDL, TOKENIZER, marked=False)


def text_of(ids: list[int]) -> str:
    return b"".join(TOKENIZER.token_bytes[i] for i in ids).decode()


@pytest.fixture(scope="module")
def walks():
    """Random sentences as token ids."""
    found = []
    for seed in range(70):
        rng = np.random.default_rng(seed)
        ids = walk_query(QUERIES.start(), rng, int(rng.integers(1, 40)))
        if ids is not None:
            found.append(ids)
    assert len(found) > 50
    return found


ACCEPTED = """
SELECT name FROM customers
select Name from CUSTOMERS
SELECT name FROM customers;
SELECT name FROM customers ;
SELECT DISTINCT name, city FROM customers
SELECT DISTINCT(city) FROM customers
SELECT * FROM orders
SELECT T1.* FROM orders AS T1
SELECT orders.total FROM orders
SELECT T1.total,T1.id FROM orders AS T1 WHERE T1.id=1
SELECT T1.total , T1.id FROM orders T1 WHERE T1.id <> 1
SELECT COUNT(*) FROM orders
SELECT COUNT( * ) FROM orders
SELECT COUNT ( id ) FROM orders
SELECT COUNT(DISTINCT customer_id), MAX(total) - MIN(total) FROM orders
SELECT total * 1.5e3 + -2 FROM orders WHERE total >= .5
SELECT `order date`, "select", [order date], "name" FROM orders, customers
SELECT "unit;price" FROM "line items" WHERE größe = 'x'
SELECT "line items"."unit;price" FROM `line items`
SELECT c.name FROM customers AS c INNER JOIN orders AS o ON c.id = o.customer_id
SELECT c.name FROM customers AS c LEFT JOIN orders AS o USING (id) CROSS JOIN big
SELECT name FROM customers NATURAL JOIN orders
SELECT name FROM customers, orders WHERE customers.id = orders.customer_id
SELECT name FROM customers WHERE name LIKE '%a%' AND NOT city IS NULL OR city IS NOT NULL
SELECT name FROM customers WHERE name NOT LIKE 'O''Brien' ESCAPE '\\'
SELECT name FROM customers WHERE city IN ('a', "b") AND id NOT IN (1,2) AND id BETWEEN 1 AND 2 AND name GLOB 'a*'
SELECT name FROM customers WHERE (id = 1 OR id = 2) AND NOT(id > 3) AND id NOTNULL
SELECT name FROM customers WHERE id IN (SELECT customer_id FROM orders WHERE total > (SELECT AVG(total) FROM orders))
SELECT name FROM customers WHERE EXISTS (SELECT 1 FROM orders WHERE customer_id = customers.id)
SELECT city, COUNT(*) AS n FROM customers GROUP BY city HAVING COUNT(*) > 1 AND n < 9 ORDER BY n DESC, city ASC LIMIT 3
SELECT name FROM customers ORDER BY name COLLATE NOCASE DESC NULLS LAST LIMIT 3 OFFSET 2
SELECT name FROM customers ORDER BY 1 LIMIT 3, 2
SELECT CASE WHEN total > 1 THEN 'a' ELSE 'b' END FROM orders
SELECT CASE id WHEN 1 THEN 'a' WHEN 2 THEN 'b' END AS x FROM orders
SELECT CAST(total AS REAL) * 100 / COUNT(*), CAST(id AS VARCHAR(10)) FROM orders
SELECT IIF(total > 1, 'YES', 'NO'), COALESCE(total, 0), ROUND(total, 2), SUBSTR(name, 1, 2) FROM orders, customers
SELECT STRFTIME('%Y', `order date`) FROM orders WHERE DATE(`order date`) < CURRENT_DATE
SELECT n.total FROM (SELECT total FROM big) AS n
SELECT n.x + x FROM (SELECT total AS x FROM big) AS n JOIN customers ON n.x = customers.id
SELECT MAX(x) FROM (SELECT COUNT(*) AS x FROM orders GROUP BY customer_id)
SELECT name FROM customers UNION ALL SELECT product FROM "line items" ORDER BY name
SELECT id FROM customers INTERSECT SELECT customer_id FROM orders EXCEPT SELECT order_id FROM big
SELECT (SELECT COUNT(*) FROM orders) - (SELECT COUNT(*) FROM customers)
WITH t AS (SELECT id FROM orders), u(a) AS (SELECT id FROM big) SELECT COUNT(*) FROM t WHERE id > (SELECT MAX(a) FROM u)
SELECT RANK() OVER (PARTITION BY city ORDER BY name) AS r, SUM(id) OVER () FROM customers
SELECT COUNT(*) FILTER (WHERE id > 1) FROM customers
SELECT name AS "the name" FROM customers
""".strip().split("\n")

REFUSED = [
    ("", 0, "SELECT"),
    ("SELECT", 6, "the text ends here"),
    ("SELECT 1", 8, "the text ends here"),
    ("SeLeCt id FROM orders", 1, "(next: 'E'), found 'e'"),
    ("DELETE FROM orders", 0, "expected WITH or SELECT"),
    ("SELECT bogus FROM orders", 24, "the text ends here"),
    ("SELECT customers.total FROM orders", 17, "a column"),
    ("SELECT o.bogus FROM orders AS o", 31, "the text ends here"),
    ("SELECT id FROM nowhere", 15, "found 'n'"),
    ("SELECT id FROM orders WHERE bogus = 1", 33, "found ' '"),
    ("SELECT id FROM orders ORDER BY bogus", 36, "the text ends here"),
    ("SELECT id FROM orders AS select", 31, "the text ends here"),
    ("SELECT  id FROM orders", 7, "found ' '"),
    ("SELECT id\nFROM orders", 9, "found '\\n'"),
    ("SELECT id FROM orders -- all", 22, "found '-'"),
    ("SELECT id--1 FROM orders", 10, "found '-'"),
    ("SELECT id FROM orders; DROP TABLE orders", 22, "expected the end"),
    ("SELECT load_extension('x') FROM orders", 21, "found '('"),
    ("SELECT order date FROM orders", 12, ""),
    ("SELECT id FROM orders WHERE id BETWEEN 1", 40, "the text ends here"),
    ("SELECT 'a\ud800' FROM orders", 9, "surrogate"),
]


@pytest.fixture(scope="module")
def shop():
    connection = sqlite3.connect(":memory:")
    connection.executescript(DDL)
    yield connection
    connection.close()


@pytest.mark.parametrize("query", ACCEPTED)
def test_accepted_and_read_by_sqlite(query, shop):
    acceptance = QUERIES.accepts(query)
    assert acceptance.accepted, acceptance
    assert not QUERIES.accepts(query[:-1].rstrip() + "(").accepted
    assert QUERIES.parse(query) == [{"sql": query}]
    shop.execute("EXPLAIN " + query)
    matcher = QUERIES.start()
    for token in TOKENIZER.encode(query):
        tags = matcher.accept(token).tags
        assert tags
        assert min(tags) >= 0


@pytest.mark.parametrize(("query", "position", "reason"), REFUSED)
def test_refused_with_the_place(query, position, reason):
    acceptance = QUERIES.accepts(query)
    assert not acceptance.accepted
    assert (acceptance.position, reason in acceptance.reason) == (position, True), acceptance


def test_parse_refuses_what_is_no_sentence():
    with pytest.raises(RequestError, match="not a query of this schema at character 15: FROM"):
        QUERIES.parse("SELECT id FROM nowhere")


def test_it_is_a_constraint_that_frozen_policies_know():
    assert isinstance(QUERIES, Constraint)
    assert jaxkv.SqlQueries is SqlQueries
    assert GRAMMARS["sql"] is SQL_VOCABULARY is QUERIES.vocabulary


def test_sqlite_reads_every_walk(walks, shop):
    """No syntax error in any; names may be wrong, since a grammar cannot bind an alias (no such column, ...)."""
    named = 0
    for ids in walks:
        text = text_of(ids)
        assert QUERIES.accepts(text).accepted
        message = ""
        try:
            shop.execute("EXPLAIN " + text)
        except sqlite3.Error as error:
            named, message = named + 1, str(error)
        for fault in ("syntax", "token", "incomplete", "must be", "should come"):
            assert fault not in message, (text, message)
    assert named < len(walks)


def test_masks_are_those_of_the_unmarked_grammar(walks):
    words = QUERIES.stop_mask.shape[0]
    for ids in walks[:20]:
        matcher, reference = QUERIES.start(), xgrammar.GrammarMatcher(UNMARKED._compiled)
        for token in ids:
            ours, theirs = np.zeros(words, np.int32), np.zeros((1, words), np.int32)
            matcher.fill_mask(ours)
            reference.fill_next_token_bitmask(theirs)
            theirs[0, -1] &= QUERIES.last_word
            np.testing.assert_array_equal(ours, theirs[0])
            matcher.accept(token)
            assert reference.accept_token(token)


def test_a_token_is_accepted_exactly_if_permitted(walks):
    for ids in walks[:4]:
        matcher = QUERIES.start()
        for token in ids[:9]:
            allowed = set(permitted(matcher))
            state = matcher.parser_state
            for other in range(TOKENIZER.special):
                if other in allowed:
                    matcher.accept(other)
                    matcher.rollback(1)
                else:
                    with pytest.raises(RequestError):
                        matcher.accept(other)
            assert (set(permitted(matcher)), matcher.parser_state) == (allowed, state)
            matcher.accept(token)


def test_rollback_is_exact_at_every_token(walks):
    for ids in walks[:8]:
        ids = ids[:30]
        matcher, states, transitions = QUERIES.start(), [], []
        for token in ids:
            states.append((permitted(matcher), matcher.parser_state))
            transitions.append(matcher.accept(token))
        for back in range(1, len(ids) + 1, 3):
            matcher.rollback(back)
            assert (permitted(matcher), matcher.parser_state) == states[-back]
            for i in range(len(ids) - back, len(ids)):
                assert matcher.accept(ids[i]) == transitions[i]


def test_the_schema_of_a_file_is_that_of_its_ddl(tmp_path, monkeypatch):
    path = tmp_path / "a shop?.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(DDL)
    connection.commit()
    connection.close()
    before = path.read_bytes()
    for given in (path, str(path)):
        assert read_schema(given).tables == read_schema(DDL).tables
    assert SqlQueries(path, TOKENIZER).ebnf == QUERIES.ebnf
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name]
    assert read_schema(read_schema(DDL).ddl).tables == read_schema(DDL).tables


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("nowhere.sqlite", "'nowhere.sqlite' is neither a database file nor DDL"),
        ("CREATE TABLE t (a INTEGER);\n\nCREATE TABLE u (a,, b);", "DDL line 3: 'CREATE TABLE u': near"),
        ("-- x\n/* y\n */ CREATE TABLE t (a); CREATE TABLE t (b);", "DDL line 3: 'CREATE TABLE t': table t already"),
        ("CREATE TABLE t (a);\nATTACH 'x' AS y;", "DDL line 2: \"ATTACH 'x' AS y;\" creates nothing"),
        ("CREATE TABLE t (a);\nUPDATE t SET a = 1;", "DDL line 2: 'UPDATE t SET a' creates nothing"),
        ("CREATE TABLE t (a", "DDL line 1: 'CREATE TABLE t': incomplete input"),
        ("CREATE VIEW v AS SELECT x FROM nowhere;", "no such table"),
        ('CREATE TABLE t (a, "\n");', "'\\n' of 't' is empty or not printable"),
        ("WITH x AS (SELECT 1) SELECT 'create table t(a)'", "creates nothing"),
        (
            "CREATE TABLE t AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT i FROM n;",
            "interrupted",
        ),
    ],
)
def test_bad_schemas_name_the_place(given, expected):
    with pytest.raises(SchemaError) as caught:
        read_schema(given)
    assert expected in str(caught.value)


def test_a_file_that_is_no_database(tmp_path):
    path = tmp_path / "x.sqlite"
    path.write_text("not a database " * 100)
    with pytest.raises(SchemaError, match="is no SQLite database"):
        read_schema(path)
    empty = tmp_path / "empty.sqlite"
    empty.touch()
    with pytest.raises(SchemaError, match="has no table"):
        read_schema(empty)


def test_statements_of_a_dump_are_passed_over():
    dump = (
        "PRAGMA foreign_keys=OFF;\nBEGIN TRANSACTION;\nCREATE TABLE t (a TEXT);\nINSERT INTO t VALUES('x;y');\nCOMMIT;"
    )
    assert [table.name for table in read_schema(dump).tables] == ["t"]


@pytest.mark.parametrize(
    "name", ["a b", 'say "hi"', "tick`s", "brack]et", "select", "1st", "größe", "x.y", "日本", "Mixed", "%"]
)
def test_names_of_every_kind(name):
    quoted = '"' + name.replace('"', '""') + '"'
    ddl = f"CREATE TABLE {quoted} ({quoted} TEXT, other INTEGER);"
    queries = SqlQueries(ddl, TOKENIZER)
    text = f"SELECT {quoted}, T1.{quoted} FROM {quoted} AS T1 WHERE {quoted}.{quoted} = 'x'"
    assert queries.parse(text) == [{"sql": text}]
    connection = sqlite3.connect(":memory:")
    connection.execute(ddl)
    connection.execute("EXPLAIN " + text.replace("WHERE " + quoted + ".", "WHERE T1."))
    bare = f"SELECT {name} FROM {name}"
    try:
        connection.execute("EXPLAIN " + bare)
    except sqlite3.Error:
        assert not queries.accepts(bare).accepted
    else:
        assert queries.accepts(bare).accepted
    connection.close()
