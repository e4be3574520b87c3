r"""SQL queries: a SQLite schema -> marked EBNF, and the structural tags of PASK's text-to-SQL vocabulary.

A sentence is one SELECT statement in SQLite's dialect, with an optional semicolon (`jaxkv.grammar.sql_rules` has the
rules). Keywords are in capitals or in small letters, names of the schema in any case, as in
SQLite. There is one blank where SQL needs one, and one blank or
none around operators, commas and parentheses; no other blanks and no comments (free blanks let small models loop).

Which byte belongs to which part (PASK Table 5):

==========================================================  =================  =================  ======
text                                                        class              role               region
==========================================================  =================  =================  ======
keywords, functions, operators, punctuation, blanks, NULL,  pure_scaffold      that of the clause  no
quotes of names and texts, types of CAST
table and column names of the schema                        schema_bearing     that of the clause  yes
text of a string between its quotes, number                 free_generation    that of the clause  yes
aliases and names that the query makes up                   free_generation    that of the clause  no
==========================================================  =================  =================  ======

Roles: ``projection`` from SELECT to the end of the list, ``relation`` from FROM or JOIN on, ``predicate`` for ON,
USING, WHERE, GROUP BY, HAVING, ORDER BY and LIMIT, ``outside_schema`` for WITH, set operators and the semicolon. A
sub-query starts anew: its own SELECT is a projection wherever it stands, and its parentheses belong to the clause
around it.

``state`` is ``critical`` inside a schema name or a literal, ``boundary`` where a token enters or leaves one (so
`` name`` with its blank is boundary), and ``stable`` elsewhere, in aliases too. ``lookahead_critical`` looks past one
blank, because tokens of most vocabularies carry the blank before a word.

A name that is both one of the schema and one that anyone may make up counts as the schema's; so does, until they part,
a beginning of both (PASK B.1: ambiguous mappings use schema context). A text in double quotes is a name if the schema
has it, else a string, as in SQLite.

The kinds of parser states: the clause for its punctuation (``select.scaffold``, also ``from``, ``on``, ``where``,
``group``, ``having``, ``order``, ``limit``, ``set``, ``with``, ``query``), role and part for the rest
(``predicate.column``, also ``table``, ``alias``, ``text``, ``number``, ``quote``, ``keyword``).
"""

from pathlib import Path

from jaxkv.errors import RequestError
from jaxkv.grammar.constraint import GrammarConstraint, TokenizerLike
from jaxkv.grammar.sql_rules import SqlGrammar
from jaxkv.grammar.sql_schema import SqlSchema, read_schema
from jaxkv.grammar.tags import SQL_VOCABULARY


class SqlQueries(GrammarConstraint):
    """The constraint of text-to-SQL.

    Args:
        database_or_ddl: a SQLite database file, opened read-only; DDL text; or a schema that was read before.
        tokenizer: the model's tokenizer.
        marked: False leaves the markers out; masks are the same and every tag is unresolved.

    Raises:
        SchemaError: the file is missing or no database, a DDL statement is wrong (with its line), or no table is there.
    """

    whole = "the query"
    past_blank = True

    def __init__(self, database_or_ddl: str | Path | SqlSchema, tokenizer: TokenizerLike, *, marked: bool = True):
        given = database_or_ddl
        self.schema = given if isinstance(given, SqlSchema) else read_schema(given)
        super().__init__(SqlGrammar(self.schema, marked=marked), SQL_VOCABULARY, tokenizer)

    def parse(self, text: str) -> list[dict]:
        """``[{"sql": text}]`` for a complete sentence.

        Raises:
            RequestError: `text` is not a sentence of the grammar.
        """
        acceptance = self.accepts(text)
        if not acceptance.accepted:
            raise RequestError(f"not a query of this schema at character {acceptance.position}: {acceptance.reason}")
        return [{"sql": text}]
