"""A tokenizer as the rest of the package sees it: ids, raw bytes per id, chat template, stop tokens."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

from jaxkv.errors import ModelError, RequestError


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """Wraps a transformers tokenizer.

    ``vocab_size`` is the model's, padding included; ``stop_ids`` end a generation; ``hf`` is the transformers object.
    """

    hf: Any = dataclasses.field(repr=False)
    vocab_size: int
    stop_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text`` alone, no beginning-of-sequence token added; special tokens in it are read as such.

        Bytes that the vocabulary lacks (SmolLM2: six control characters and planes 4 to 11) are dropped.
        """
        return list(self.hf.encode(text, add_special_tokens=False))

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Text of ``ids``, special tokens left out; incomplete UTF-8 sequences become U+FFFD."""
        return b"".join(self.token_bytes[int(i)] for i in ids).decode("utf-8", errors="replace")

    def apply_chat_template(self, messages: Sequence[Any]) -> list[int]:
        """Ids of a conversation in the tokenizer's own template, with the header that asks the assistant to speak.

        Raises RequestError for messages that the template refuses, ModelError for a tokenizer without a template.
        """
        if not self.hf.chat_template:
            raise ModelError(
                "this tokenizer has no chat template; use an instruction-tuned checkpoint or encode() a prompt"
            )
        for position, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
                raise RequestError(f"message {position} is {message!r}; a message is a mapping with a role and content")
        if not messages:
            raise RequestError("there are no messages; a conversation has at least one")
        try:
            text = self.hf.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs of the checkpoint and raise what they like
            raise RequestError(f"the chat template refuses these messages: {error}") from error
        return self.encode(text)

    def texts(self, ids: Iterable[int]) -> tuple[str, ...]:
        """Text of each id by itself, special tokens by their names: for showing, not for parsing."""
        return tuple(self.hf.decode([int(i)], skip_special_tokens=False) for i in ids)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text."""
        added = (index for index, token in self.hf.added_tokens_decoder.items() if token.special)
        return frozenset(added) | frozenset(self.hf.all_special_ids)

    @property
    def token_bytes(self) -> tuple[bytes, ...]:
        """Raw bytes of each id, b"" for special tokens and for the padding at the end of the vocabulary."""
        return self._token_bytes

    @functools.cached_property
    def _token_bytes(self) -> tuple[bytes, ...]:
        table: list[bytes] = [b""] * self.vocab_size
        added = self.hf.added_tokens_decoder
        byte_level = _is_byte_level(self.hf)
        for token, index in self.hf.get_vocab().items():
            if index >= self.vocab_size:
                raise ModelError(f"token {token!r} has id {index}, beyond the model's vocabulary of {self.vocab_size}")
            if index in self.special_ids:
                continue
            if index in added:
                table[index] = token.encode()
            else:
                table[index] = _byte_level(token) if byte_level else _byte_fallback(token)
        return tuple(table)

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json, its configuration and the chat template, as transformers reads them."""
        self.hf.save_pretrained(folder)


def load_tokenizer(folder: Path, vocab_size: int, stop_ids: Iterable[int] = (), **options: Any) -> Tokenizer:
    """Reads the tokenizer of a folder through transformers' AutoTokenizer, offline and without code from the folder.

    ``stop_ids`` are added to the tokenizer's own end-of-sequence token. Raises ModelError if there is none to read.
    """
    from transformers import AutoTokenizer

    try:
        hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:  # transformers raises nearly every kind, by file and tokenizer class
        raise ModelError(f"{folder} holds no readable tokenizer ({error}); it needs tokenizer.json") from error
    if not hf.is_fast:
        raise ModelError(f"{folder} holds a slow tokenizer; convert it to tokenizer.json")
    own = () if hf.eos_token_id is None else (hf.eos_token_id,)
    stops = tuple(sorted({int(i) for i in (*own, *stop_ids)}))
    if not stops:
        raise ModelError(f"{folder} names no end-of-sequence token; add eos_token_id to generation_config.json")
    return Tokenizer(hf, vocab_size, stops)


def _is_byte_level(hf: Any) -> bool:
    # The decoder says how pieces become bytes; it is described as "ByteLevel(...)", alone or inside a Sequence.
    return "ByteLevel" in str(hf.backend_tokenizer.decoder)


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's map of bytes to printable characters, turned round."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level(token: str) -> bytes:
    table = _byte_of_character()
    return bytes(table[character] for character in token)


def _byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()
