"""A generation result with known numbers, and a tag vocabulary that names every id."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxkv.state.payload import Cost


class Token(NamedTuple):
    token_id: int
    text: str
    tags: tuple[int, ...]
    actions: tuple[int, ...]


class Vocabulary:
    """Tag i is `class-i / role / state / next`."""

    def tag(self, index: int) -> tuple[str, ...]:
        return (f"class-{index}", "role", "state", "next")


@pytest.fixture
def vocabulary() -> Vocabulary:
    return Vocabulary()


@pytest.fixture
def make_result() -> Callable[..., SimpleNamespace]:
    """A function that makes a result, with some of its fields changed."""
    return _make_result


def _make_result(**changes: Any) -> SimpleNamespace:
    """Three prompt tokens, three answer tokens and a stop token; every ratio has its own value."""
    values: dict[str, Any] = {
        "request_id": "0",
        "text": '{"name": "f"}',
        "tokens": (
            Token(10, '{"', (1,), (2, 1, 0)),
            Token(11, "name", (2, 3), (2, 2, 2)),
            Token(12, "\n\x1b[31m", (1,), (0, 0, 1)),
            Token(2, "<|im_end|>", (), ()),
        ),
        "calls": [{"name": "f", "arguments": {}}],
        "finish_reason": "stop",
        "error": None,
        "prompt_ids": (5, 6, 7),
        "prompt_texts": ("<s>", " b", "c"),
        "prompt_actions": np.array([[2, 2, 2], [1, 1, 0], [2, 2, 2]], np.int8),
        "cost": Cost(
            prefill=3200,
            prefill_full=4800,
            decode=1200,
            decode_full=4800,
            live=900,
            live_full=1000,
            allocated_bytes=123456,
            prompt_tokens=3,
            generated_tokens=3,
            decode_steps=3,
        ),
        "policy": "hand-made",
        "calibrated": True,
        "groups": ("lower", "middle", "upper"),
        "seconds_prefill": 0.5,
        "seconds_decode": 1.25,
    }
    return SimpleNamespace(**{**values, **changes})
