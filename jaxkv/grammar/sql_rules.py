"""The marked EBNF of one SELECT statement over a schema, in SQLite's dialect.

Names are bound as far as a context-free grammar can: tables and columns come from the schema, and a column that is
qualified by its table's name is one of that table. Which table an alias stands for is not known, so any column of the
schema may follow an alias. A name that the query itself makes up (an alias of a result, a column of a sub-query, a
common table) is a free identifier, and may be *used* only where the query can have made one up. That is what the scopes
are for; a query is read in all scopes that are still possible:

=====  ================================================================================================
scope  names that may stand for a column
=====  ================================================================================================
s      strict: columns of the schema
l      loose: free identifiers too, and in nested queries also as tables. Queries with a sub-query in FROM and
       queries after WITH, with what is nested in them; GROUP BY, HAVING and ORDER BY of queries whose SELECT
       list has an alias
=====  ================================================================================================

A SELECT without FROM has its own, small expressions: a sub-query comes first, alone, in CAST or in a function, and
may go on in arithmetic with others, numbers and texts. So no query can end before it has named a table.
"""

from typing import Final

from jaxkv.grammar.ebnf import GrammarBuilder
from jaxkv.grammar.frontier import Marker
from jaxkv.grammar.sql_notation import expand, identifier_except, keyword, name_in_any_case
from jaxkv.grammar.sql_schema import SqlSchema

RESERVED: Final = frozenset(
    "ADD ALL ALTER AND AS AUTOINCREMENT BETWEEN CASE CAST CHECK COLLATE COMMIT CONSTRAINT CREATE CROSS CURRENT_DATE "
    "CURRENT_TIME CURRENT_TIMESTAMP DEFAULT DEFERRABLE DELETE DISTINCT DROP ELSE ESCAPE EXCEPT EXISTS FOREIGN FROM "
    "FULL GLOB GROUP HAVING IN INDEX INDEXED INNER INSERT INTERSECT INTO IS ISNULL JOIN LEFT LIKE LIMIT MATCH NATURAL "
    "NOT NOTHING NOTNULL NULL ON OR ORDER OUTER PRIMARY RAISE RECURSIVE REFERENCES REGEXP RETURNING RIGHT SELECT SET "
    "TABLE THEN TO TRANSACTION UNION UNIQUE UPDATE USING VALUES WHEN WHERE".lower().split()
)
"""Words that SQLite refuses as a bare column, table or alias somewhere; found by trying all of its keywords."""

_NO_ALIAS: Final = RESERVED | frozenset(
    ("asc", "by", "desc", "end", "filter", "groups", "nulls", "offset", "over", "range", "rows", "window", "with")
)

_FUNCTIONS: Final = {
    "scalar": "ABS CEIL CEILING CHAR COALESCE DATE DATETIME EXP FLOOR FORMAT GLOB HEX IFNULL IIF INSTR JULIANDAY "
    "LENGTH LIKE LN LOG LOWER LTRIM MOD NULLIF POW POWER PRINTF QUOTE REPLACE ROUND RTRIM SIGN SQRT STRFTIME SUBSTR "
    "SUBSTRING TIME TRIM TRUNC TYPEOF UNICODE UNIXEPOCH UPPER",
    "moment": "DATE DATETIME JULIANDAY RANDOM TIME",
    "count": "COUNT",
    "aggregate": "AVG COUNT GROUP_CONCAT MAX MIN SUM TOTAL",
    "rank": "ROW_NUMBER RANK DENSE_RANK PERCENT_RANK CUME_DIST",
    "window": "FIRST_VALUE LAG LAST_VALUE LEAD NTH_VALUE NTILE",
    "type_name": "BIGINT BLOB BOOLEAN CHAR DATE DATETIME DECIMAL DOUBLE FLOAT INT INTEGER NUMERIC REAL SIGNED TEXT "
    "UNSIGNED VARCHAR",
    "constant": "NULL TRUE FALSE CURRENT_DATE CURRENT_TIME CURRENT_TIMESTAMP",
}
"""Names that are fixed: functions by what may follow them, types, constants. MAX and MIN have one argument or more."""

_EXPRESSION: Final = {
    "expr@": "start@ tail@*",
    "start@": "operand@ | '-' operand@ | NOT _ start@ | NOT paren@",
    "tail@": "~ symbol ~ start@ | ~ '-' _ start@ | ~ '-' operand@ | _ AND _ start@ | _ AND paren@ | _ OR _ start@ | "
    "_ OR paren@ | _ IS _ start@ | negatable@ | _ NOT negatable@ | _ NOT _ NULL | _ ISNULL | _ NOTNULL | "
    "_ COLLATE collation%",
    "negatable@": "_ LIKE _ plain@ | _ LIKE paren@ | _ LIKE _ plain@ _ ESCAPE _ string% | _ GLOB _ plain@ | "
    "_ IN ~ '(' ~ query& ~ ')' | _ IN ~ '(' ~ args@ ~ ')' | _ BETWEEN _ arith@ _ AND _ plain@",
    "plain@": "operand@ | '-' operand@",
    "arith@": "plain@ arith_tail@*",
    "arith_tail@": "~ arithmetic ~ plain@ | ~ '-' _ plain@ | ~ '-' operand@",
    "paren@": "'(' ~ expr@ ~ ')' | '(' ~ query& ~ ')'",
    "args@": "expr@ | expr@ ~ ',' ~ args@",
    "operand@": "ref@ | number% | string% | constant% | paren@ | function@ | case@ | EXISTS ~ '(' ~ query& ~ ')' | "
    "CAST ~ '(' ~ expr@ _ AS _ type% ~ ')'",
    "case@": "CASE when@ | CASE _ expr@ when@",
    "when@": "_ WHEN _ expr@ _ THEN _ expr@ _ END | _ WHEN _ expr@ _ THEN _ expr@ _ ELSE _ expr@ _ END | "
    "_ WHEN _ expr@ _ THEN _ expr@ when@",
    "function@": "scalar% arguments@ | moment% nothing | aggregate@ | aggregate@ window_of@ | rank% nothing over@ | "
    "window% arguments@ over@",
    "arguments@": "~ '(' ~ args@ ~ ')'",
    "aggregate@": "count% all | aggregate% arguments@ | aggregate% distinct@",
    "distinct@": "~ '(' ~ DISTINCT _ expr@ ~ ')' | ~ '(' ~ DISTINCT paren@ tail@* ~ ')'",
    "window_of@": "over@ | filter@ | filter@ over@",
    "filter@": "_ FILTER ~ '(' ~ WHERE _ expr@ ~ ')'",
    "over@": "_ OVER ~ '(' ~ ')' | _ OVER ~ '(' ~ frame@ ~ ')'",
    "frame@": "PARTITION _ BY _ args@ | ORDER _ BY _ sort@ | PARTITION _ BY _ args@ _ ORDER _ BY _ sort@ | "
    "ORDER _ BY _ sort@ rows% | PARTITION _ BY _ args@ _ ORDER _ BY _ sort@ rows%",
    "sort@": "sort_term@ | sort_term@ ~ ',' ~ sort@",
    "sort_term@": "expr@ | expr@ direction% | expr@ nulls% | expr@ direction% nulls%",
}
"""Rules of an expression; @ stands for role and scope, % for the role, & for the scope of what is nested in it."""

_PARTS: Final = {
    "collation%": "_ NOCASE | _ BINARY | _ RTRIM",
    "direction%": "_ ASC | _ DESC",
    "nulls%": "_ NULLS _ FIRST | _ NULLS _ LAST",
    "rows%": "unit% _ BETWEEN _ UNBOUNDED _ PRECEDING _ AND _ CURRENT _ ROW | unit% _ UNBOUNDED _ PRECEDING | "
    "unit% _ BETWEEN _ UNBOUNDED _ PRECEDING _ AND _ UNBOUNDED _ FOLLOWING",
    "unit%": "_ ROWS | _ RANGE",
    "type%": "type_name% | type_name% size%",
    "size%": "~ '(' ~ digits% ~ ')' | ~ '(' ~ digits% ~ ',' ~ digits% ~ ')'",
}

_SHARED: Final = {
    "symbol": "'=' | '==' | '!=' | '<>' | '<' | '<=' | '>' | '>=' | '+' | '*' | '/' | '%' | '||' | '&' | '<<' | '>>'",
    "arithmetic": "'+' | '*' | '/' | '%' | '||'",
    "nothing": "~ '(' ~ ')'",
    "all": "~ '(' ~ '*' ~ ')'",
}

_SELECT: Final = {
    "items_s": "item_s | item_s ~ ',' ~ items_s",
    "item_s": "star | expr_p_s",
    "items_a": "named_s | item_s ~ ',' ~ items_a | named_s ~ ',' ~ items_a | named_s ~ ',' ~ items_s",
    "named_s": "expr_p_s alias_p",
    "items_l": "item_l | item_l ~ ',' ~ items_l",
    "item_l": "star | expr_p_l | expr_p_l alias_p",
    "items_n": "item_n | item_n ~ ',' ~ items_n",
    "item_n": "expr_n | expr_n alias_p",
    "expr_n": "first_n tail_n*",
    "first_n": "'(' ~ query_s ~ ')' | '(' ~ expr_n ~ ')' | scalar_p ~ '(' ~ expr_n ~ ')' | "
    "scalar_p ~ '(' ~ expr_n ~ ',' ~ args_n ~ ')' | CAST ~ '(' ~ expr_n _ AS _ type_p ~ ')'",
    "tail_n": "~ symbol ~ operand_n | ~ '-' _ operand_n | ~ '-' operand_n",
    "operand_n": "number_p | string_p | '-' number_p | first_n",
    "args_n": "operand_n tail_n* | operand_n tail_n* ~ ',' ~ args_n",
    "first_s": "paren_p_s tail_p_s* | paren_p_s tail_p_s* ~ ',' ~ items_s",
    "first_a": "paren_p_s tail_p_s* alias_p | paren_p_s tail_p_s* alias_p ~ ',' ~ items_s",
    "first_l": "paren_p_l tail_p_l* | paren_p_l tail_p_l* alias_p | paren_p_l tail_p_l* ~ ',' ~ items_l",
    "alias_p": "_ AS _ new_p | _ new_bare_p",
    "star": "'*' | name_table_p '.' '*' | qualifier_p '.' '*'",
}

_FROM: Final = {
    "titem": "name_table_r | name_table_r alias_r",
    "alias_r": "_ AS _ new_r | _ new_bare_r",
    "sitem_s": "nested_s | nested_s alias_r",
    "sitem_l": "nested_l | nested_l alias_r",
    "fitem_s": "titem | sitem_s",
    "fitem_l": "titem | sitem_l | made_up_r | made_up_r alias_r",
    # Strict queries have tables only (t), or at least one sub-query, which the first of them tells (d).
    "joined_s": "~ ',' ~ titem | join_word _ titem | join_word _ titem on_s | natural_word _ titem",
    "joined_t": "~ ',' ~ titem | join_word _ titem | join_word _ titem on_l | natural_word _ titem",
    "joined_first": "~ ',' ~ sitem_s | join_word _ sitem_s | join_word sitem_s | join_word _ sitem_s on_l | "
    "join_word sitem_s on_l | natural_word _ sitem_s",
    "joined_d": "~ ',' ~ fitem_s | join_word _ fitem_s | join_word sitem_s | join_word _ fitem_s on_l | "
    "join_word sitem_s on_l | natural_word _ fitem_s",
    "joined_l": "~ ',' ~ fitem_l | join_word _ fitem_l | join_word sitem_l | join_word _ fitem_l on_l | "
    "join_word sitem_l on_l | natural_word _ fitem_l",
    "join_word": "_ JOIN | _ INNER _ JOIN | _ CROSS _ JOIN | _ LEFT _ JOIN | _ LEFT _ OUTER _ JOIN | _ RIGHT _ JOIN | "
    "_ RIGHT _ OUTER _ JOIN | _ FULL _ JOIN | _ FULL _ OUTER _ JOIN",
    "natural_word": "_ NATURAL _ JOIN | _ NATURAL _ INNER _ JOIN | _ NATURAL _ LEFT _ JOIN",
    "columns_q": "name_column_q | name_column_q ~ ',' ~ columns_q",
}

_CORES: Final = {
    "core_s": "select_s from_s where_s? group_s?",
    "core_a": "select_a from_s where_s? group_l?",
    "core_d": "select_l from_d where_l? group_l?",
    "core_l": "select_l from_l where_l? group_l?",
    "core_n": "select_n",
    "ends_s": "order_s | order_s limit | limit",
    "ends_l": "order_l | order_l limit | limit",
    "cores_s": "core_s | core_a | core_d | core_n",
    "cores_l": "core_l | core_n",
    "query_s": "core_s ends_s? | core_a ends_l? | core_d ends_l? | core_n | cores_s set_s ends_l?",
    "query_l": "core_l ends_l? | core_n | cores_l set_l ends_l?",
    "limit_number": "number_q | '(' ~ query_s ~ ')'",
}


class SqlGrammar(GrammarBuilder):
    """The rules of one SELECT statement over `schema`."""

    def __init__(self, schema: SqlSchema, *, marked: bool):
        super().__init__(marked=marked)
        self.schema = schema
        self._helpers: dict[str, str] = {}
        self._scaffolds = {kind: self._scaffold(kind) for kind in _CLAUSES}
        self._nested = Marker("from.scaffold", "pure_scaffold", "relation", False, path="FROM",
                              expected="the end of the sub-query", alphabet=frozenset(b"() "))  # fmt: skip
        self._add("root", "query_s | query_s ~ ';' | with | with ~ ';'", "o", self._scaffolds["query"])
        self._add("with", "with_head _ query_l", "o")
        self._add("with_head", "WITH _ commons | WITH _ RECURSIVE _ commons", "o", self._scaffolds["with"])
        self._add("commons", "common | common ~ ',' ~ commons", "o")
        columns = "common_name ~ '(' ~ common_columns ~ ')' _ AS ~ '(' ~ query_l ~ ')'"
        self._add("common", columns + " | common_name _ AS ~ '(' ~ query_l ~ ')'", "o")
        self._add("common_columns", "common_name | common_name ~ ',' ~ common_columns", "o")
        self._lexical()
        for role, rules in (("o", _SHARED), ("p", _SELECT), ("r", _FROM), ("o", _CORES)):
            for name, body in rules.items():
                self._add(name, body, role)
        self._clauses()
        for role in "pq":
            for name, body in _PARTS.items():
                self._add(name.replace("%", f"_{role}"), body.replace("%", f"_{role}"), role)
            for scope in "sl":
                for name, body in _EXPRESSION.items():
                    body = body.replace("@", f"_{role}_{scope}").replace("%", f"_{role}").replace("&", f"_{scope}")
                    self._add(name.replace("@", f"_{role}_{scope}"), body, role)
        self._names()

    def _add(self, name: str, body: str, role: str, marker: Marker | None = None) -> str:
        """Add a rule in the short notation; its keywords have the markers of `role`."""
        text, helpers = expand(body, lambda word: self._keyword(word, role))
        for helper, content in helpers.items():
            if helper not in self._helpers:
                self.rule(helper, content)
            elif self._helpers[helper] != content:
                raise AssertionError(f"two helper rules are named {helper}")
            self._helpers[helper] = content
        return self.rule(name, text, marker)

    def _keyword(self, word: str, role: str, kind: str = "") -> str:
        """The rule of a keyword, with the blank before it if there is one: a part of its own, so that a frontier shows
        which keywords can come and a name is never taken for one."""
        name = f"k{word.replace(' ', '_')}_{kind or role}"
        if name not in self:
            cls = _ROLES[role]
            shown = f"{kind}.scaffold" if kind else f"{cls}.keyword"
            texts = frozenset((word.lower().encode(),))
            marker = Marker(shown, "pure_scaffold", cls, False, path=kind.upper(), expected=word.strip(),
                            texts=texts, fold=True)  # fmt: skip
            self.rule(name, ('" " ' if word.startswith(" ") else "") + keyword(word.strip()), marker)
        return name

    def _scaffold(self, kind: str) -> Marker:
        """The operators, punctuation and blanks of a clause; one marker for all scopes."""
        return Marker(f"{kind}.scaffold", "pure_scaffold", _ROLES[_CLAUSES[kind]], False, path=kind.upper(),
                      expected=f"{kind.upper()}'s next part", alphabet=_SEPARATORS.get(kind, _OPERATORS))  # fmt: skip

    def _clauses(self) -> None:
        """The marked rules: each begins with its keyword, which has a marker of its own, since a clause that has not
        begun consumes nothing else."""
        for m in "sanl":
            first = f" | select_head _ DISTINCT first_{m}" * (m != "n")
            body = (
                f"select_head _ items_{m} | select_head _ DISTINCT _ items_{m} | select_head _ ALL _ items_{m}{first}"
            )
            self._clause(f"select_{m}", body)
        from_d = "from_head _ titem joined_t* joined_first joined_d* | from_head _ sitem_s joined_d* | "
        self._clause("from_s", "from_head _ titem joined_s*")
        self._clause("from_d", from_d + "from_head sitem_s joined_d*")
        self._clause("from_l", "from_head _ fitem_l joined_l* | from_head sitem_l joined_l*")
        for m in "sl":
            self._add(f"nested_{m}", f"'(' ~ query_{m} ~ ')'", "r", self._nested)
            on = f"on_head _ expr_q_{m} | on_head paren_q_{m} tail_q_{m}* | using_head ~ '(' ~ columns_q ~ ')'"
            self._clause(f"on_{m}", on)
            self._clause(f"where_{m}", f"where_head _ expr_q_{m} | where_head paren_q_{m} tail_q_{m}*")
            self.rule(f"group_{m}", f"group_by_{m} having_{m}?")
            self._clause(f"group_by_{m}", f"group_head _ BY _ args_q_{m}")
            self._clause(f"having_{m}", f"having_head _ expr_q_{m} | having_head paren_q_{m} tail_q_{m}*")
            self._clause(f"order_{m}", f"order_head _ BY _ sort_q_{m}")
            self._clause(f"set_{m}", f"set_more _ cores_{m} | set_more _ cores_{m} set_{m}")
        limits = "limit_head _ limit_number | limit_head _ limit_number _ OFFSET _ limit_number"
        self._clause("limit", limits + " | limit_head _ limit_number ~ ',' ~ limit_number")
        more = [self._keyword(f" {word}", "o", "set") for word in ("UNION", "INTERSECT", "EXCEPT")]
        self.rule("set_more", " | ".join([*more, f"{more[0]} {self._keyword(' ALL', 'o')}"]))
        for kind, word in _HEADS.items():
            self.rule(f"{kind}_head", self._keyword(word, _CLAUSES[kind], kind))
        self.rule("using_head", self._keyword(" USING", "q", "on"))

    def _clause(self, name: str, body: str) -> None:
        kind = name.split("_")[0]
        self._add(name, body, _CLAUSES[kind], self._scaffolds[kind])

    def _lexical(self) -> None:
        for role in "pq":
            cls = _ROLES[role]
            digits = Marker(
                f"{cls}.keyword", "pure_scaffold", cls, False, expected="a size", alphabet=frozenset(b"0123456789")
            )
            self.rule(f"digits_{role}", "[0-9]+", digits)
            for group, text in _FUNCTIONS.items():
                names = frozenset(name.lower().encode() for name in text.split())
                marker = Marker(
                    f"{cls}.keyword", "pure_scaffold", cls, False, expected=f"a {group}", texts=names, fold=True
                )
                self.rule(f"{group}_{role}", " | ".join(keyword(name) for name in text.split()), marker)
        self.rule("identifier", identifier_except(_NO_ALIAS))
        # A qualifier that is a table's name is that table: its columns are known.
        tables = {table.name.lower() for table in self.schema.tables if table.name.isascii() and _is_bare(table.name)}
        self.rule("unbound", identifier_except(_NO_ALIAS | tables))
        for role in "pqr":
            cls = _ROLES[role]
            made_up = Marker(f"{cls}.alias", "free_generation", cls, False, expected="an alias",
                             alphabet=_NAME_BYTES, weak=True)  # fmt: skip
            quoted = Marker(f"{cls}.alias", "free_generation", cls, False, expected="an alias", weak=True)
            if role != "q":
                self.rule(f"new_bare_{role}", "identifier", made_up)
                self.rule(f"new_quoted_{role}", r'"\"" [^"\x00-\x1f]+ "\"" | "`" [^`\x00-\x1f]+ "`" | '
                          r'''"'" [^'\x00-\x1f]+ "'"''', quoted)  # fmt: skip
                self.rule(f"new_{role}", f"new_bare_{role} | new_quoted_{role}")
            self.rule(f"qualifier_{role}", "unbound", made_up)
            if role == "r":
                continue
            number = Marker(f"{cls}.number", "free_generation", cls, True, expected="a number", alphabet=_NUMBER_BYTES)
            self.rule(f"number_{role}", r'([0-9]+ ("." [0-9]+)? | "." [0-9]+) ([eE] [+\-]? [0-9]+)?', number)
            text = Marker(f"{cls}.text", "free_generation", cls, True, expected="a text",
                          alphabet=_ALL_BYTES - {ord("'")})  # fmt: skip
            self.rule(f"text_{role}", rf"""{_PLAIN} ("''" {_PLAIN})*""", text)
            dtext = Marker(f"{cls}.text", "free_generation", cls, True, expected="a text",
                           alphabet=_ALL_BYTES - {ord('"')}, weak=True)  # fmt: skip
            self.rule(f"dtext_{role}", rf'{_DPLAIN} ("\"\"" {_DPLAIN})*', dtext)
            quote = Marker(f"{cls}.quote", "pure_scaffold", cls, False, expected="a quote",
                           alphabet=frozenset(b"\"'"))  # fmt: skip
            self.rule(f"string_{role}", f'''"'" text_{role} "'" | "\\"" dtext_{role} "\\""''', quote)
        name = Marker("outside_schema.alias", "free_generation", "outside_schema", False, expected="a name",
                      alphabet=_NAME_BYTES, weak=True)  # fmt: skip
        self.rule("common_name", "identifier", name)
        self.rule("made_up_r", "qualifier_r")

    def _names(self) -> None:
        """Names of the schema: for each role all columns, the tables, and for each table its own columns."""
        tables = self.schema.tables
        columns = tuple(dict.fromkeys(column for table in tables for column in table.columns))
        for role in "pqr":
            cls = _ROLES[role]
            table_marker = _name_marker(f"{cls}.table", cls, [table.name for table in tables], "a table")
            if role != "q":
                self._name(f"name_table_{role}", [table.name for table in tables], table_marker)
            if role == "r":
                continue
            column_marker = _name_marker(f"{cls}.column", cls, columns, "a column")
            self._name(f"name_column_{role}", columns, column_marker)
            qualified = [f"name_column_{role}", f'qualifier_{role} "." name_column_{role}']
            for i, table in enumerate(tables):
                self._name(f"name_table_{role}_{i}", [table.name], table_marker)
                self._name(f"name_column_{role}_{i}", table.columns, column_marker)
                qualified.append(f'name_table_{role}_{i} "." name_column_{role}_{i}')
            self.rule(f"ref_{role}_s", " | ".join(qualified))
            free = f'ref_{role}_s | qualifier_{role} | qualifier_{role} "." qualifier_{role}'
            self.rule(f"ref_{role}_l", free)

    def _name(self, rule: str, names: list[str] | tuple[str, ...], marker: Marker) -> None:
        """Add `rule`: one of `names`, bare where SQLite reads it as a name, or quoted."""
        bare = [name for name in names if _is_bare(name)]
        plain = [name for name in names if not set(name) & set('"`]')]
        options = []
        if bare:
            self.rule(f"{rule}_b", " | ".join(name_in_any_case(name) for name in bare), marker)
            options.append(f"{rule}_b")
        if plain:
            self.rule(f"{rule}_i", " | ".join(name_in_any_case(name) for name in plain), marker)
            options += [f'"{quote}" {rule}_i "{end}"' for quote, end in (('\\"', '\\"'), ("`", "`"), ("[", "]"))]
        for i, name in enumerate(name for name in names if name not in plain):
            self.rule(f"{rule}_e{i}", name_in_any_case(name.replace('"', '""')), marker)
            options.append(f'"\\"" {rule}_e{i} "\\""')
        self.rule(rule, " | ".join(options))


_ROLES: Final = {"p": "projection", "q": "predicate", "r": "relation", "o": "outside_schema"}
_CLAUSES: Final = {
    **{"select": "p", "from": "r", "on": "q", "where": "q", "group": "q", "having": "q", "order": "q", "limit": "q"},
    **{"set": "o", "with": "o", "query": "o"},
}
_HEADS: Final = {
    "select": "SELECT",
    **{kind: f" {kind.upper()}" for kind in ("from", "on", "where", "group", "having", "order", "limit")},
}
_SEPARATORS: Final = {
    "from": frozenset(b" ,\"'`[]"),
    "set": frozenset(b" "),
    "with": frozenset(b" ,()"),
    "query": frozenset(b" ;"),
}
_ALL_BYTES: Final = frozenset(range(256))
_NAME_BYTES: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_")
_NUMBER_BYTES: Final = frozenset(b"0123456789.eE+-")
_OPERATORS: Final = frozenset(b" ,.()*=!<>+-/%|&\"`[]'")
_PLAIN: Final = r"[\x20-\x26\x28-\ud7ff\ue000-\U0010ffff]*"
_DPLAIN: Final = r"[\x20-\x21\x23-\ud7ff\ue000-\U0010ffff]*"


def _is_bare(name: str) -> bool:
    return name.isidentifier() and name.lower() not in RESERVED


def _name_marker(kind: str, role: str, names: list[str] | tuple[str, ...], expected: str) -> Marker:
    texts = frozenset(text.encode().lower() for name in names for text in (name, name.replace('"', '""')))
    return Marker(kind, "schema_bearing", role, True, True, expected=expected, texts=texts, fold=True)
