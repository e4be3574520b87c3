"""Matchers: masks, rejected tokens, finished rows, rollback, independence."""

import numpy as np
import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_grammar import PIECES, ToyTokenizer, arguments, call, permitted, walk

from jaxkv.errors import RequestError
from jaxkv.grammar import Constraint, FunctionCalls
from jaxkv.grammar.constraint import compiler_of

TOKENIZER = ToyTokenizer(PIECES)
TOOLS = [
    *call("get_weather", city={"type": "string"}, days={"type": "integer", "optional": True}),
    *call(
        "max",
        max={"type": "float"},
        min={"enum": ["a", "ab", 1], "optional": True},
        x={"type": "any", "optional": True},
    ),
    *call("get.größe", points={"type": "array", "items": {"type": "dict", "properties": {"a": {"type": "boolean"}}}}),
]
CALLS = FunctionCalls(TOOLS, TOKENIZER, parallel=None, max_calls=3)
SENTENCE = arguments('{"city": "Paris", "days": 12}', "get_weather")


def fresh(ids: list[int]):
    matcher = CALLS.start()
    return matcher, [matcher.accept(i) for i in ids]


def view(matcher) -> tuple:
    return permitted(matcher), matcher.parser_state, matcher.terminated, matcher.tokens


def test_it_is_a_constraint():
    assert isinstance(CALLS, Constraint)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.data())
def test_rollback_is_exact(seed, data):
    """Accept k, roll back k: masks, parser states and all later tags are as if the k tokens never came."""
    ids = walk(CALLS.start(), np.random.default_rng(seed), 30)
    _, transitions = fresh(ids)
    matcher = CALLS.start()
    position = 0
    for _ in range(6):
        target = data.draw(st.integers(position, len(ids)))
        for i in range(position, target):
            assert matcher.accept(ids[i]) == transitions[i]
        back = data.draw(st.integers(0, target))
        matcher.rollback(back)
        position = target - back
        expected, _ = fresh(ids[:position])
        assert view(matcher) == view(expected)
    for i in range(position, len(ids)):
        assert matcher.accept(ids[i]) == transitions[i]
    assert matcher.terminated


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, TOKENIZER.vocab_size + 3), min_size=1, max_size=30))
def test_a_token_is_accepted_exactly_if_permitted_and_a_rejected_one_changes_nothing(seed, attempts):
    rng = np.random.default_rng(seed)
    ids = walk(CALLS.start(), rng, 25)
    matcher, _ = fresh(ids[: rng.integers(0, len(ids))])
    for token in attempts:
        before = view(matcher)
        if token in before[0]:
            matcher.accept(token)
            matcher.rollback(1)
        else:
            with pytest.raises(RequestError):
                matcher.accept(token)
        assert view(matcher) == before


def test_a_token_that_fails_at_a_later_byte_changes_nothing():
    """Every token of the vocabulary, at every position of a sentence."""
    ids, failures = TOKENIZER.encode(SENTENCE), 0
    matcher = CALLS.start()
    for accepted in ids:
        before = view(matcher)
        starts = {TOKENIZER.token_bytes[i] for i in before[0] if i < 256}
        for token in set(range(256, TOKENIZER.used - 3)) - set(before[0]):
            if TOKENIZER.token_bytes[token][:1] in starts:
                failures += 1
                with pytest.raises(RequestError, match="does not allow byte"):
                    matcher.accept(token)
                assert view(matcher) == before
        matcher.accept(accepted)
    assert failures > 20


def test_masks_are_those_of_the_unmarked_grammar_fed_whole_tokens():
    unmarked = FunctionCalls(TOOLS, TOKENIZER, parallel=None, max_calls=3, marked=False)
    assert "temperature" in CALLS.ebnf
    assert "temperature" not in unmarked.ebnf
    words = -(-TOKENIZER.vocab_size // 32)
    for seed in range(20):
        matcher, reference = CALLS.start(), xgrammar.GrammarMatcher(unmarked._compiled)
        for token in walk(CALLS.start(), np.random.default_rng(seed), 30):
            ours, theirs = np.zeros(words, np.int32), np.zeros((1, words), np.int32)
            matcher.fill_mask(ours)
            reference.fill_next_token_bitmask(theirs)
            theirs[0, -1] &= (1 << TOKENIZER.vocab_size % 32) - 1
            np.testing.assert_array_equal(ours, theirs[0])
            matcher.accept(token)
            assert reference.accept_token(token)


def test_special_tokens_and_the_padded_tail_are_never_permitted():
    matcher = CALLS.start()
    for token in [*TOKENIZER.encode(SENTENCE), TOKENIZER.stop_ids[0]]:
        allowed = permitted(matcher)
        assert max(allowed) < TOKENIZER.used
        assert TOKENIZER.special not in allowed
        matcher.accept(token)
    for token in (TOKENIZER.special, TOKENIZER.used, TOKENIZER.vocab_size, -1):
        with pytest.raises(RequestError, match="special or unused"):
            CALLS.start().accept(token)


def test_strings_hold_well_formed_utf8_only():
    prefix = list(arguments('{"city": "', "get_weather")[:-1].encode())
    cases = {0xC2: (0x80, 0xC0), 0xE0: (0xA0, 0xC0), 0xED: (0x80, 0xA0), 0xF0: (0x90, 0xC0), 0xF4: (0x80, 0x90)}
    for lead, following in cases.items():
        assert permitted(fresh([*prefix, lead])[0]) == list(range(*following))
    allowed = permitted(fresh(prefix)[0])
    assert [i for i in range(0x80, 0x100) if i in allowed] == list(range(0xC2, 0xF5))
    assert not set(range(0x20)) & set(allowed)


def test_stop_tokens_are_permitted_exactly_when_the_sentence_is_complete():
    stops = set(TOKENIZER.stop_ids)
    matcher = CALLS.start()
    data = SENTENCE.encode()
    for i in range(len(data)):
        assert not stops & set(permitted(matcher))
        with pytest.raises(RequestError, match="not complete"):
            matcher.accept(TOKENIZER.stop_ids[0])
        matcher.accept(data[i])
    assert set(permitted(matcher)) == stops
    assert matcher.parser_state == ""


@pytest.mark.parametrize("stop", TOKENIZER.stop_ids)
def test_a_finished_row_is_inert(stop):
    ids = TOKENIZER.encode(SENTENCE)
    matcher, _ = fresh(ids)
    assert matcher.accept(stop) == ((), "", True)
    for token in (*TOKENIZER.stop_ids, ids[0], TOKENIZER.special):
        before = view(matcher)
        with pytest.raises(RequestError, match="sentence has ended"):
            matcher.accept(token)
        assert view(matcher) == before
        assert before[0] == list(TOKENIZER.stop_ids)
    matcher.rollback(1)
    assert view(matcher) == view(fresh(ids)[0])
    matcher.accept(stop)
    matcher.rollback(len(ids) + 1)
    assert view(matcher) == view(CALLS.start())


def test_rollback_beyond_the_start_is_an_error():
    matcher, _ = fresh(TOKENIZER.encode(SENTENCE)[:3])
    before = view(matcher)
    for count in (4, -1):
        with pytest.raises(RequestError, match="3 were accepted"):
            matcher.rollback(count)
        assert view(matcher) == before
    matcher.rollback(0)
    assert view(matcher) == before


def test_rows_and_constraints_are_independent():
    other = FunctionCalls(call("f", x={"type": "boolean"}), TOKENIZER)
    one, two, three = CALLS.start(), CALLS.start(), other.start()
    ids = TOKENIZER.encode(SENTENCE)
    texts = TOKENIZER.encode(arguments('{"x": true}'))
    for i in range(max(len(ids), len(texts))):
        if i < len(ids):
            one.accept(ids[i])
        if i < len(texts):
            three.accept(texts[i])
    assert view(two) == view(CALLS.start())
    assert view(one) == view(fresh(ids)[0])
    assert permitted(three) == list(TOKENIZER.stop_ids)


def test_a_mask_of_another_shape_is_an_error():
    for mask in (
        np.zeros(3, np.int32),
        np.zeros(CALLS.stop_mask.shape, np.int64),
        np.zeros((1, *CALLS.stop_mask.shape), np.int32),
    ):
        with pytest.raises(RequestError, match="expected int32"):
            CALLS.start().fill_mask(mask)


def test_a_row_of_a_batch_of_masks_can_be_filled_in_place():
    masks = np.full((3, *CALLS.stop_mask.shape), -1, np.int32)
    CALLS.start().fill_mask(masks[1])
    assert (masks[[0, 2]] == -1).all()
    assert sorted(np.nonzero(np.unpackbits(masks[1].view(np.uint8), bitorder="little"))[0]) == permitted(CALLS.start())


def test_one_compiler_serves_all_schemas_of_a_tokenizer():
    assert compiler_of(TOKENIZER) is compiler_of(TOKENIZER)
    assert compiler_of(TOKENIZER) is not compiler_of(ToyTokenizer(PIECES))
