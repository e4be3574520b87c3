"""What a generation gives back."""

import dataclasses
import os
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int8

from jaxkv.grammar.tags import TagVocabulary
from jaxkv.state.payload import Cost


class TokenRecord(NamedTuple):
    """One generated non-stop token: its id and text, its candidate tags, and its action in each layer group.

    The text of a token that ends inside a UTF-8 sequence holds U+FFFD; `GenerationResult.text` is exact.
    """

    token_id: int
    text: str
    tags: tuple[int, ...]
    actions: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """One finished request.

    `finish_reason` is "stop" (a stop token), "length" (the token limit, or the context's end: the answer may be
    incomplete and `calls` is None), "abandoned" (the request's own `abandon` said so; `calls` is None) or "error"
    (`error` says what failed; the other rows of the batch are unaffected).
    `vocabulary` names the ids in the tokens' `tags`; None without a constraint.
    `calibrated` is False for a policy whose values were set by hand: its figures say nothing of the method.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    tokens: tuple[TokenRecord, ...]
    calls: list[dict[str, Any]] | None
    finish_reason: str
    error: str | None
    prompt_ids: tuple[int, ...]
    prompt_texts: tuple[str, ...]
    prompt_actions: Int8[np.ndarray, "n C"]
    cost: Cost
    policy: str
    calibrated: bool
    groups: tuple[str, ...]
    window: int
    sinks: int
    seconds_prefill: float
    seconds_decode: float
    vocabulary: TagVocabulary | None = None

    @property
    def sql(self) -> str | None:
        """The query, if the constraint was `SqlQueries` and the answer is complete; else None."""
        return self.calls[0].get("sql") if self.calls else None

    def report(self, path: str | os.PathLike) -> None:
        """Write the run as one self-contained HTML page: every token, coloured by its action in each layer group."""
        from jaxkv.report.html import write_html

        write_html(self, path)
