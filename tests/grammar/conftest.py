"""One small tokenizer for all grammar tests."""

import pytest
from toy_grammar import PIECES, ToyTokenizer


@pytest.fixture(scope="session")
def tokenizer() -> ToyTokenizer:
    return ToyTokenizer(PIECES)
