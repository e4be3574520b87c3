"""Tokens as bytes, the chat template, and what they refuse."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.errors import ModelError, RequestError
from jaxkv.models.tokenizer import _byte_fallback, load_tokenizer

# Text without surrogates; special tokens written out are not text.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40).filter(lambda text: "<|" not in text)


@pytest.fixture(scope="module")
def tiny(tokenizer_folder):
    return load_tokenizer(tokenizer_folder, vocab_size=320)


def test_every_byte_has_its_token(tiny):
    assert sorted(tiny.token_bytes[:256]) == [bytes([b]) for b in range(256)]
    assert len(tiny.token_bytes) == tiny.vocab_size == 320
    assert set(tiny.token_bytes[256:]) == {b""}  # two special tokens and padding


@given(TEXT)
def test_bytes_of_tokens_are_the_text(tiny, text):
    ids = tiny.encode(text)
    assert b"".join(tiny.token_bytes[i] for i in ids) == text.encode()
    assert tiny.decode(ids) == text


def test_incomplete_utf8_is_replaced(tiny):
    ids = tiny.encode("é")
    assert tiny.decode(ids[:1]) == "�"


def test_special_tokens_are_no_text(tiny):
    assert tiny.special_ids == {256, 257}
    assert tiny.decode([256, *tiny.encode("a"), 257]) == "a"


def test_chat_template_asks_for_an_answer(tiny):
    ids = tiny.apply_chat_template([{"role": "user", "content": "hi"}])
    assert ids == [256, *tiny.encode("user: hi"), 257, 256, *tiny.encode("assistant: ")]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no messages"),
        ([{"role": "user"}], "message 0"),
        ([{"role": "user", "content": "x"}, "hello"], "message 1"),
        ([{"content": "x"}], "message 0"),
    ],
)
def test_malformed_messages(tiny, messages, message):
    with pytest.raises(RequestError, match=message):
        tiny.apply_chat_template(messages)


def test_template_that_refuses(tiny, monkeypatch):
    monkeypatch.setattr(tiny.hf, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        tiny.apply_chat_template([{"role": "user", "content": "x"}])


def test_no_template(tiny, monkeypatch):
    monkeypatch.setattr(tiny.hf, "chat_template", None)
    with pytest.raises(ModelError, match="no chat template"):
        tiny.apply_chat_template([{"role": "user", "content": "x"}])


def test_empty_folder_has_no_tokenizer(tmp_path):
    with pytest.raises(ModelError, match="no readable tokenizer"):
        load_tokenizer(tmp_path, 10)


def test_pieces_with_byte_fallback():
    assert _byte_fallback("▁the") == b" the"
    assert _byte_fallback("<0xE9>") == b"\xe9"
    assert _byte_fallback("é") == "é".encode()


@pytest.mark.model
@settings(deadline=None)
@given(TEXT)
def test_bytes_of_smollm2_tokens_are_the_text(smollm2, text):
    tokenizer = smollm2.tokenizer
    known = {single[0] for single in tokenizer.token_bytes if len(single) == 1}
    assert known >= set(range(0x20, 0x7F)) | {*b"\t\n\r"} | set(range(0x80, 0xC0)) | set(range(0xC2, 0xF1))
    text = "".join(character for character in text if set(character.encode()) <= known)
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes[i] for i in ids) == text.encode()
    assert tokenizer.decode(ids) == text
