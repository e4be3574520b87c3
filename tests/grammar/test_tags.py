"""Structural tags, token by token, against tables written by hand from PASK Table 5 and its reading here."""

import pytest
from toy_grammar import PIECES, ToyTokenizer, arguments, call

from jaxkv.grammar import CALL_VOCABULARY, UNRESOLVED, FunctionCalls, GrammarConstraint, Tag
from jaxkv.grammar.ebnf import GrammarBuilder
from jaxkv.grammar.frontier import Marker

TOKENIZER = ToyTokenizer(PIECES)
CLASSES = {"pure": "pure_scaffold", "schema": "schema_bearing", "free": "free_generation"}
ROLES = {"sep": "scaffold_separator", "req": "required", "opt": "optional", "fun": "dispatch_key"}
NEXT = {"look": "lookahead_critical", "no": "no_lookahead"}


def tags(text: str) -> set[Tag]:
    """'schema req critical no | ...' -> tags."""
    result = set()
    for part in text.split(" | "):
        cls, role, state, following = part.split()
        result.add(Tag(CLASSES[cls], ROLES[role], state, NEXT[following]))
    return result


def check(constraint, table):
    """Feed the tokens of `table` (text, expected tags, parser state or None) and compare."""
    matcher = constraint.start()
    for text, expected, parser_state in table:
        transition = matcher.accept(TOKENIZER.ids[text.encode() if isinstance(text, str) else text])
        got = [CALL_VOCABULARY.tag(i) for i in transition.tags]
        assert set(got) == tags(expected), text
        assert len(got) == len(set(got))
        assert list(transition.tags) == sorted(transition.tags)
        if parser_state is not None:
            assert transition.parser_state == parser_state, text
        assert matcher.parser_state == transition.parser_state
    return matcher


WEATHER = call("get_weather", city={"type": "string"}, days={"type": "integer", "optional": True})


def test_one_call_token_by_token():
    matcher = check(FunctionCalls(WEATHER, TOKENIZER), [
        ('{"name', "pure sep boundary no", "scaffold"),
        ('": ', "pure sep boundary no", "scaffold"),
        ('"', "pure sep boundary look", "dispatch"),
        ("get", "schema fun critical no", "dispatch"),
        ("_weather", "schema fun critical no", "scaffold"),
        ('", "', "pure sep boundary no", "scaffold"),
        ("arguments", "pure sep boundary no", "scaffold"),
        ('": {"', "pure sep boundary look", "required.key"),
        ("ci", "schema req critical no", "required.key"),
        ("ty", "schema req critical no", "scaffold"),
        ('": "', "pure sep boundary look", "required.string,scaffold"),
        ("Par", "free req critical no", "required.string,scaffold"),
        ("is", "free req critical no", "required.string,scaffold"),
        ('", "', "pure sep boundary no", "optional.key"),
        ("days", "schema opt critical no", "scaffold"),
        ('": ', "pure sep boundary no", "optional.choice,optional.number"),
        ("12", "free opt critical no", "optional.number,scaffold"),
        ("}}", "pure sep boundary no", ""),
    ])  # fmt: skip
    assert matcher.accept(TOKENIZER.stop_ids[1]) == ((), "", True)


def test_tokens_that_cross_parts_have_the_tags_of_all():
    check(FunctionCalls(WEATHER, TOKENIZER, parallel=True), [
        ("[", "pure sep boundary no", "scaffold"),
        ('{"name": "', "pure sep boundary look", "dispatch"),
        ("get", "schema fun critical no", "dispatch"),
        ("_weather", "schema fun critical no", "scaffold"),
        ('", "arguments": {"', "pure sep boundary look", "required.key"),
        ("c", "schema req critical no", "required.key"),
        ('ity": "P', "schema req boundary no | pure sep boundary no | free req boundary no",
         "required.string,scaffold"),
        ("\\u00", "free req critical no", "required.string"),
        ("0", "free req critical no", "required.string"),
        ("0", "free req critical no", "required.string,scaffold"),
        ('\\"', "free req critical no", "required.string,scaffold"),
        ('", "', "pure sep boundary no", "optional.key"),
        ("days", "schema opt critical no", "scaffold"),
        ('"', "pure sep boundary no", "scaffold"),
        (":", "pure sep boundary no", "scaffold"),
        (" null", "pure sep boundary no | schema opt boundary no", "scaffold"),
        ("}", "pure sep boundary no", "scaffold"),
        ('}, {"name": "', "pure sep boundary look", "dispatch"),
    ])  # fmt: skip


def test_bytes_of_a_split_character_belong_to_the_string():
    prefix = TOKENIZER.encode(arguments('{"city": "', "get_weather")[:-1])
    matcher = FunctionCalls(WEATHER, TOKENIZER).start()
    for token in prefix:
        matcher.accept(token)
    for byte in "日".encode():
        assert {CALL_VOCABULARY.tag(i) for i in matcher.accept(byte).tags} == tags("free req critical no")


def after(tools, text, **options):
    matcher = FunctionCalls(tools, TOKENIZER, **options).start()
    for token in TOKENIZER.encode(text):
        transition = matcher.accept(token)
    return matcher, transition


def step(matcher, token) -> set[Tag]:
    return {CALL_VOCABULARY.tag(i) for i in matcher.accept(TOKENIZER.ids[token.encode()]).tags}


HEAD = '{"name": "f", "arguments": '


def test_keys_with_a_common_beginning_are_ambiguous_until_they_part():
    tools = call(mi={"type": "integer", "optional": True}, ma={"type": "integer"})
    matcher, transition = after(tools, HEAD + '{"')
    assert CALL_VOCABULARY.tag(transition.tags[0]).next == "lookahead_critical"
    assert transition.parser_state == "optional.key,required.key"
    assert step(matcher, "m") == tags("schema req critical no | schema opt critical no")
    assert step(matcher, "i") == tags("schema opt critical no")
    matcher.rollback(2)
    # Later bytes of the same token decide.
    assert step(matcher, "ma") == tags("schema req critical no")
    matcher.rollback(1)
    assert step(matcher, "mi") == tags("schema opt critical no")


def test_a_key_that_begins_another():
    tools = call(ab={"type": "integer", "optional": True}, a={"type": "integer"})
    matcher, _ = after(tools, HEAD + '{"')
    assert step(matcher, "a") == tags("schema req critical no | schema opt critical no")
    assert matcher.parser_state == "optional.key,scaffold"
    assert step(matcher, '": ') == tags("pure sep boundary look")
    matcher.rollback(2)
    assert step(matcher, "ab") == tags("schema opt critical no")
    matcher.rollback(1)
    assert step(matcher, 'a":') == tags("schema req boundary no | pure sep boundary no")


def test_functions_with_a_common_beginning_share_their_tag():
    tools = [*call("max", x={"type": "integer"}), *call("max.x"), *call("mi")]
    matcher, _ = after(tools, '{"name": "')
    assert step(matcher, "ma") == tags("schema fun critical no")
    assert step(matcher, "x") == tags("schema fun critical no")
    assert matcher.parser_state == "dispatch,scaffold"


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_the_role_of_nested_parameters(outer, inner):
    nested = {"type": "dict", "properties": {"a": {"type": "string"}}, "required": ["a"] if inner else []}
    tools = call(x={**nested, "optional": not outer})
    role, look = ("req", "look") if outer and inner else ("opt", "no")
    outer_role = "req" if outer else "opt"
    matcher, _ = after(tools, HEAD + '{"')
    assert step(matcher, "x") == tags(f"schema {outer_role} critical no")
    assert step(matcher, '": {"') == tags(f"pure sep boundary {look}")
    assert step(matcher, "a") == tags(f"schema {role} critical no")
    assert step(matcher, '": "') == tags(f"pure sep boundary {look}")
    assert step(matcher, "Par") == tags(f"free {role} critical no")
    assert step(matcher, '"}') == tags("pure sep boundary no")


OPEN, PLAIN = "pure sep boundary LOOK", "pure sep boundary no"
WORD, FREE = "schema ROLE critical no", "free ROLE critical no"
VALUE_TAGS = [
    ({"type": "boolean"}, "true", [WORD]),
    ({"type": "boolean"}, "tr|u|e", [WORD, WORD, WORD]),
    ({"type": "float"}, "0.5|e+|12", [FREE, FREE, FREE]),
    ({"enum": ["celsius", "celebration"]}, '"|cel|sius|"', [OPEN, WORD, WORD, PLAIN]),
    ({"enum": ["celsius"]}, '"cel|sius|"', [f"{PLAIN} | schema ROLE boundary no", WORD, PLAIN]),
    ({"type": "array", "items": {"type": "integer"}}, "[1|, |12|]",
     [f"{PLAIN} | free ROLE boundary no", OPEN, FREE, PLAIN]),
    ({"type": "array", "items": {"type": "string"}}, '["|Par|", "|is|"]', [OPEN, FREE, OPEN, FREE, PLAIN]),
    ({"type": "any"}, '{"|x|": |true|, |"|a|": |null|}',
     [OPEN, FREE, OPEN, WORD, PLAIN, OPEN, FREE, OPEN, WORD, PLAIN]),
    ({"anyOf": [{"type": "string"}, {"enum": ["cel"]}]}, '"|cel|"', [OPEN, f"{FREE} | {WORD}", PLAIN]),
    ({"anyOf": [{"type": "string"}, {"enum": ["cel"]}]}, '"|x|cel|"', [OPEN, FREE, FREE, PLAIN]),
    ({"anyOf": [{"type": "integer"}, {"enum": [12, None]}]}, "12", [f"{FREE} | {WORD}"]),
]  # fmt: skip


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize(("schema", "tokens", "expected"), VALUE_TAGS)
def test_values(schema, tokens, expected, optional):
    role, look = ("opt", "no") if optional else ("req", "look")
    matcher, _ = after(call(x={**schema, "optional": optional}), HEAD + '{"x": ')
    got = [step(matcher, token) for token in tokens.split("|")]
    assert got == [tags(text.replace("ROLE", role).replace("LOOK", look)) for text in expected]


def test_unmarked_grammars_are_unresolved():
    _, transition = after(WEATHER, '{"name', marked=False)
    assert transition == ((UNRESOLVED,), "unresolved", False)


def test_an_unmarked_part_takes_the_tag_of_the_part_before_it():
    builder = GrammarBuilder()
    builder.rule("root", '"x" name "12" | "x" name tail')
    marker = Marker("dispatch", "schema_bearing", "dispatch_key", True, texts=frozenset((b"a",)))
    builder.rule("name", '"a"', marker)
    builder.rule("tail", '"mi" | "ma"')
    matcher = GrammarConstraint(builder, CALL_VOCABULARY, TOKENIZER).start()
    assert matcher.accept(ord("x")).tags == (UNRESOLVED,)
    expected = Tag("schema_bearing", "dispatch_key", "critical", "no_lookahead")
    for text in ("a", "12"):
        assert matcher.accept(TOKENIZER.ids[text.encode()]).tags == (CALL_VOCABULARY.index(expected),)


def test_a_part_that_repeats_without_a_separator_starts_anew():
    builder = GrammarBuilder()
    builder.rule("root", "word word word")
    marker = Marker("word", "schema_bearing", "required", True, critical=True, texts=frozenset((b"max",)))
    builder.rule("word", '"max"', marker)
    check(GrammarConstraint(builder, CALL_VOCABULARY, TOKENIZER), [
        ("m", "schema req critical no", "word"),
        ("a", "schema req critical no", "word"),
        ("x", "schema req critical look", "word"),
        ("max", "schema req critical look", "word"),
        ("ma", "schema req critical no", "word"),
    ])  # fmt: skip


def test_the_vocabulary_counts_through_table_5():
    assert CALL_VOCABULARY.size == 48
    assert len(set(CALL_VOCABULARY.tags)) == 48
    assert CALL_VOCABULARY.tag(0) == tags("pure sep boundary look").pop()
    assert CALL_VOCABULARY.tag(47) == tags("free fun critical no").pop()
    assert [CALL_VOCABULARY.index(tag) for tag in CALL_VOCABULARY.tags] == list(range(48))
    for index in (-1, 48):
        with pytest.raises(IndexError):
            CALL_VOCABULARY.tag(index)
    with pytest.raises(KeyError):
        CALL_VOCABULARY.index(Tag("pure_scaffold", "projection", "stable", "no_lookahead"))
