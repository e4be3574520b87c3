"""The host's account of the engine's rows: what each has generated, and what the next launch must be told."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Int8

from jaxkv.engine.request import Request
from jaxkv.engine.result import TokenRecord
from jaxkv.policies.base import PADDING_TAG
from jaxkv.state.actions import HIGH, LOW

Slots = tuple[Any, Any]
"""High and low slots, one number a layer group each."""


@dataclasses.dataclass
class Row:
    """One request in one row.

    Actions are known on the host a step after the device decided them, and a token only needs a slot when it leaves the
    recent window: the host knows exactly how many slots each partition needs, and asks the device for nothing.
    """

    request: Request
    policy: Any
    prompt: list[int]
    prompt_actions: Int8[np.ndarray, "n C"]
    limit: int = 0
    matcher: Any = None
    token_ids: list[int] = dataclasses.field(default_factory=list)
    records: list[TokenRecord] = dataclasses.field(default_factory=list)
    seconds_prefill: float = 0.0
    decode_started: float = 0.0
    _expected: tuple[tuple[int, ...], str] | None = None

    def __post_init__(self) -> None:
        settled = max(len(self.prompt) - self.policy.window, 0)
        actions = self.prompt_actions[:settled]
        self._used = [np.sum(actions == kind, axis=0) for kind in (HIGH, LOW)]
        self._settled = settled

    @property
    def undecided(self) -> bool:
        """Whether the newest generated token still waits for its actions."""
        return self._expected is not None

    def expect(self, tags: tuple[int, ...], text: str) -> None:
        """The newest token is being fed; its actions come with the next fetch."""
        self._expected = (tags, text)

    def decide(self, actions: tuple[int, ...]) -> TokenRecord:
        """The record of the newest token, now that its actions are known."""
        assert self._expected is not None
        tags, text = self._expected
        record = TokenRecord(self.token_ids[-1], text, tags, actions)
        self.records.append(record)
        self._expected = None
        return record

    def slots_at_admission(self, expected_actions: np.ndarray) -> Slots:
        """Slots for the prompt, and for as many generated tokens as the policy expects to keep.

        `expected_actions` [2, C] is the expected share of generated tokens that become HIGH and LOW.
        """
        tokens = min(self.policy.window, len(self.prompt))
        recent = self.prompt_actions[len(self.prompt) - tokens :]
        return tuple(
            self._used[i] + np.sum(recent == kind, axis=0) + np.ceil(expected_actions[i] * self.limit).astype(int)
            for i, kind in enumerate((HIGH, LOW))
        )

    def slots_for_next(self) -> Slots:
        """Slots in use once the next step has moved the token that leaves the window; counts that token as moved."""
        position = len(self.prompt) + len(self.token_ids) - 1
        leaving = position - self.policy.window
        if leaving >= self._settled:
            action = self._action_of(leaving)
            self._used = [used + (action == kind) for used, kind in zip(self._used, (HIGH, LOW), strict=True)]
            self._settled = leaving + 1
        return self._used[0], self._used[1]

    def _action_of(self, position: int) -> np.ndarray:
        if position < self.policy.sinks:
            return np.full(self.prompt_actions.shape[1], HIGH)
        if position < len(self.prompt):
            return self.prompt_actions[position]
        return np.asarray(self.records[position - len(self.prompt)].actions)


class RowTables:
    """Arrays, one entry a row, that each launch of `steps.choose` takes from the host."""

    def __init__(self, rows: int, model: Any, max_tags: int):
        vocabulary = model.config.vocab_size
        words = -(-vocabulary // 32)
        self._free = unconstrained_words(model.tokenizer, vocabulary)
        self.words = np.zeros((rows, words), np.int32)
        self.tag_ids = np.full((rows, max_tags), PADDING_TAG, np.int32)
        self.parser_state = np.zeros(rows, np.int32)
        self.fed = np.zeros(rows, bool)
        self.temperature = np.zeros(rows, np.float32)
        self.top_p = np.ones(rows, np.float32)
        self.seed = np.zeros(rows, np.uint32)
        self.index = np.zeros(rows, np.int32)
        for row in range(rows):
            self.clear(row)

    def admit(self, row: int, request: Request, matcher: Any) -> None:
        """Set a row up for its request's first token."""
        self.clear(row)
        if matcher is not None:
            matcher.fill_mask(self.words[row])
        self.temperature[row], self.top_p[row], self.seed[row] = request.temperature, request.top_p, request.seed

    def clear(self, row: int) -> None:
        """Make a row inert: it samples something that nobody reads."""
        self.words[row] = self._free
        self.tag_ids[row] = PADDING_TAG
        self.fed[row] = False
        self.parser_state[row] = self.index[row] = self.temperature[row] = self.seed[row] = 0
        self.top_p[row] = 1

    def device_arguments(self) -> tuple[np.ndarray, ...]:
        """Copies in the order of `steps.choose`: the device may still read them while the host writes the next."""
        arrays = (
            self.words,
            self.tag_ids,
            self.parser_state,
            self.fed,
            self.temperature,
            self.top_p,
            self.seed,
            self.index,
        )
        return tuple(x.copy() for x in arrays)


def unconstrained_words(tokenizer: Any, vocab_size: int) -> np.ndarray:
    """Mask words that permit every token that means something: text, or the end. The padded tail stays masked."""
    stops = set(tokenizer.stop_ids)
    permitted = [bool(data) or i in stops for i, data in enumerate(tokenizer.token_bytes)]
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    bits[: len(permitted)] = permitted[:vocab_size]
    return np.packbits(bits, bitorder="little").view(np.int32)
