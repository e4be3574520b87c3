"""A small tokenizer of our own, with tokens that cross the parts of a sentence, and helpers around it."""

import numpy as np

from jaxkv.grammar import Matcher

PIECES = [
    '{"name": "', '{"', '"name', '": "', '": ', '", "arguments": {"', '", "arguments": ', "arguments", '{"name',
    '": {"', '"}}', "}}", '", "', ", ", '"}', '"]', "}]", '}, {"name": "', "get", "_weather", "city", "ci", "ty",
    "Par", "is", "days", 'ity": "P', "true", "tr", " true", "false", ": true", "null", " null", "12", "1, 2", "[1",
    '["', '", ', "max", "ma", "mi", 'a":', "ab", "x", "\\n", "\\u00", '\\"', "é", "日本", "cel", "sius", "ebration",
    '"cel', 'sius"}', "e+", "0.5", "-1",
]  # fmt: skip


class ToyTokenizer:
    """All bytes, the pieces above, two stop tokens, a special token, and a padded tail without tokens."""

    def __init__(self, pieces: list[str]):
        tokens = [bytes([i]) for i in range(256)]
        tokens += dict.fromkeys(piece.encode() for piece in pieces if len(piece.encode()) > 1)
        self.special = len(tokens)
        self.stop_ids = (self.special + 1, self.special + 2)
        self.used = len(tokens) + 3
        self.vocab_size = -(-self.used // 32) * 32 + 45
        self.token_bytes = (*tokens, *[b""] * (self.vocab_size - len(tokens)))
        self.ids = {token: i for i, token in enumerate(self.token_bytes) if token}

    def encode(self, text: str) -> list[int]:
        """Longest match from the left."""
        data, ids = text.encode(), []
        while data:
            size = next(n for n in range(len(data), 0, -1) if data[:n] in self.ids)
            ids.append(self.ids[data[:size]])
            data = data[size:]
        return ids


def permitted(matcher: Matcher) -> list[int]:
    """The permitted token ids of the current mask."""
    mask = np.full(matcher.constraint.stop_mask.shape, -1, np.int32)
    matcher.fill_mask(mask)
    return np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0].tolist()


def walk(matcher: Matcher, rng: np.random.Generator, steps: int) -> list[int]:
    """Random permitted tokens, at most `steps`, then the shortest way to the end of the sentence; returns the ids."""
    constraint, ids = matcher.constraint, []
    quote, *closing = [constraint.tokenizer.ids[c] for c in (b'"', b"}", b"]", b",", b"0")]
    while not matcher.terminated:
        allowed = permitted(matcher)
        assert allowed, "a dead end: nothing is permitted and the sentence is incomplete"
        texts = [i for i in allowed if i not in constraint.stop_ids]
        if len(ids) < steps and texts:
            token = int(rng.choice(texts))
        else:
            preferred = [*constraint.stop_ids, *([quote] if ".string" in matcher.parser_state else []), *closing, quote]
            token = next((i for i in preferred if i in allowed), allowed[0])
        matcher.accept(token)
        ids.append(token)
        assert len(ids) < steps + 400, "the walk does not end"
    return ids


def call(name: str = "f", **properties: dict) -> list[dict]:
    """One tool whose properties are required unless their schema carries ``optional``."""
    required = [key for key, schema in properties.items() if not schema.get("optional")]
    return [{"name": name, "parameters": {"type": "object", "properties": properties, "required": required}}]


def arguments(text: str, name: str = "f") -> str:
    """The sentence of a call with these arguments, given as JSON text."""
    return f'{{"name": "{name}", "arguments": {text}}}'
