"""A small shop database, a tokenizer with pieces of SQL, and walks under SQL masks."""

import numpy as np
from toy_grammar import ToyTokenizer, permitted

DDL = """
-- A shop.
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL, city TEXT);
CREATE TABLE orders (
  id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customers(id), total REAL, "order date" TEXT, "select" TEXT
);
CREATE TABLE "line items" (order_id INTEGER, product TEXT, "unit;price" REAL, größe TEXT);
CREATE VIEW big AS SELECT id AS order_id, total FROM orders WHERE total > 100;
"""

KEYWORDS = [
    "SELECT", " SELECT", "DISTINCT", " FROM", " WHERE", " GROUP", " BY", " HAVING", " ORDER", " LIMIT", " OFFSET",
    " JOIN",
    " INNER", " LEFT", " ON", " USING", " AS", " AND", " OR", " NOT", "NOT", " IN", " LIKE", " BETWEEN", " IS", " NULL",
    " EXISTS", "EXISTS", " CASE", "CASE", " WHEN", " THEN", " ELSE", " END", "CAST", " CAST", "COUNT", " COUNT", " SUM",
    " MAX", "MAX", "ABS", " ROUND", " UNION", " ALL", " EXCEPT", " DESC", " ASC", "WITH", "OVER", " OVER", " PARTITION",
    " REAL", " INTEGER", " select", " from", " where", " ESCAPE", " COLLATE", " NOCASE", " DISTINCT", " RANK",
    " NATURAL",
]  # fmt: skip
WORDS = [
    " customers", "customers", "customer", "_id", " orders", "orders", "orders.", ".id", "id", " id", " name", "name",
    "city", " city", " total", "total", "order_id", "product", "line items", "order date", "unit;price", " big", "big.",
    " T1", "T1", "T1.", " T", " x", "x", "alias0",
]  # fmt: skip
MARKS = [
    "(", ")", " (", " )", ", ", ",", " ,", " = ", " =", "=", " >=", " <", " + ", " -", "-", " *", "*", " || ", "'",
    " '",
    "\"", " \"", "`", " `", "[", "]", " 1", "1", "12", "1.5", "0", ";", " ;", "')", "COUNT(*)", "(SELECT", "abc",
    "' ", " (SELECT",
]  # fmt: skip
TOKENIZER = ToyTokenizer([*KEYWORDS, *WORDS, *MARKS])
QUOTES = ["'", '"', "`"]
CONTINUING = [
    " FROM", " big", " 1", " (SELECT", " END", " THEN", " AS", " AND", "1", " WHEN", " BY", "(", " NULL", " JOIN",
    " OVER", "=", " SELECT", "SELECT", ",", "x", " ",
]  # fmt: skip
"""What ends a sentence soon, the likeliest first."""


def walk_query(matcher, rng: np.random.Generator, steps: int) -> list[int] | None:
    """Random permitted tokens, pieces rather than bytes, then a short way to the end; None if none was found."""
    ids, pieces = [], range(256, TOKENIZER.special)
    continuing = [TOKENIZER.ids[text.encode()] for text in CONTINUING]
    while not matcher.terminated:
        allowed = permitted(matcher)
        assert allowed, "a dead end: nothing is permitted and the sentence is incomplete"
        texts = [i for i in allowed if i not in matcher.constraint.stop_ids]
        if len(ids) < steps and texts:
            if rng.random() < 0.95:
                texts = [i for i in texts if i in pieces] or texts
            if rng.random() < 0.8:  # else names grow without end
                texts = [i for i in texts if not TOKENIZER.token_bytes[i][:1].isalnum()] or texts
            token = int(rng.choice(texts))
        else:
            going_on = [i for i in continuing if i in allowed] or allowed
            if ord("{") in allowed:  # free text
                going_on = [ord(quote) for quote in QUOTES]
            token = next((i for i in (TOKENIZER.stop_ids[0], ord(")")) if i in allowed), None)
            if token is None or ord("{") in allowed:
                token = going_on[min(int(rng.geometric(0.4)), len(going_on)) - 1]
        matcher.accept(token)
        ids.append(token)
        if len(ids) > steps + 150:
            return None
    return ids
