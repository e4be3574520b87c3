"""What both reports show of a generation result, as plain values: no arrays, no ids without a name."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxkv.state.actions import ACTION_NAMES

if TYPE_CHECKING:
    from jaxkv.engine.result import GenerationResult

LETTERS = ("-", "L", "H")
"""One letter an action: released, low, high."""


@dataclass(frozen=True)
class TokenView:
    """One token: its text made visible, its action in each layer group (0 release, 1 low, 2 high), its tags' names.

    A stop token has no actions: its keys and values are never computed.
    """

    index: int
    token_id: int
    text: str
    actions: tuple[int, ...]
    tags: tuple[str, ...] = ()

    @property
    def letters(self) -> tuple[str, ...]:
        return tuple(LETTERS[action] for action in self.actions)

    def details(self, groups: Sequence[str]) -> str:
        """Everything that is known of the token, one fact a line."""
        lines = [f"token {self.index}, id {self.token_id}: {self.text}"]
        if self.actions:
            lines += [f"{group}: {ACTION_NAMES[action]}" for group, action in zip(groups, self.actions, strict=True)]
        return "\n".join(lines + [f"tag: {tag}" for tag in self.tags])


@dataclass(frozen=True)
class RatioView:
    """One ratio with the sums that it is the quotient of, in bits."""

    name: str
    value: float
    numerator: int
    denominator: int
    definition: str

    @property
    def percent(self) -> str:
        return "not defined" if math.isnan(self.value) else f"{self.value:.1%}"


@dataclass(frozen=True)
class ActionCounts:
    """How many of a part's tokens have each action in one layer group."""

    group: str
    release: int
    low: int
    high: int


def answer_tokens(result: "GenerationResult", vocabulary: Any = None) -> list[TokenView]:
    """The generated tokens. `vocabulary` names the tags; by default the result's own does."""
    vocabulary = vocabulary or getattr(result, "vocabulary", None)
    offset = len(result.prompt_ids)
    return [
        TokenView(
            offset + index, token.token_id, visible(token.text), tuple(token.actions), tag_names(token, vocabulary)
        )
        for index, token in enumerate(result.tokens)
    ]


def prompt_tokens(result: "GenerationResult") -> list[TokenView]:
    """The prompt's tokens."""
    return [
        TokenView(index, int(token_id), visible(text), tuple(int(action) for action in actions))
        for index, (token_id, text, actions) in enumerate(
            zip(result.prompt_ids, result.prompt_texts, result.prompt_actions, strict=True)
        )
    ]


def tag_names(token: Any, vocabulary: Any = None) -> tuple[str, ...]:
    """A token's candidate tags as `class / role / state / next`; a negative id is a tag that nothing resolved."""
    if vocabulary is None:
        from jaxkv.grammar.tags import CALL_VOCABULARY as vocabulary
    return tuple(" / ".join(vocabulary.tag(tag)) if tag >= 0 else "unresolved" for tag in token.tags)


def action_counts(tokens: Sequence[TokenView], groups: Sequence[str]) -> list[ActionCounts]:
    """Counts of each action, one entry a layer group."""
    columns = [[token.actions[index] for token in tokens if token.actions] for index in range(len(groups))]
    return [
        ActionCounts(group, column.count(0), column.count(1), column.count(2))
        for group, column in zip(groups, columns, strict=True)
    ]


def ratios(cost: Any) -> list[RatioView]:
    """The four ratios of a `Cost`, the headline first, each with its numerator, denominator and definition."""
    return [
        RatioView(
            "total",
            cost.ratio_total,
            cost.prefill + cost.decode,
            cost.prefill_full + cost.decode_full,
            "scheduled payload of prompt and answer / the same tokens kept whole by Full KV",
        ),
        RatioView(
            "prefill",
            cost.ratio_prefill,
            cost.prefill,
            cost.prefill_full,
            "payload that the prompt plan keeps, sinks and the last window included / every prompt token kept whole",
        ),
        RatioView(
            "decode",
            cost.ratio_decode,
            cost.decode,
            cost.decode_full,
            "payload charged for the answer's tokens by their actions, the recent window not counted / every answer "
            "token kept whole",
        ),
        RatioView(
            "live",
            cost.ratio_live,
            cost.live,
            cost.live_full,
            "payload held at each decode step, sinks and recent window included, summed over the steps / the same sum "
            "for Full KV",
        ),
    ]


def calls_json(result: "GenerationResult", indent: int | None = None) -> str:
    """The parsed calls as JSON; `null` when the answer was cut off or is no call."""
    return json.dumps(result.calls, ensure_ascii=False, indent=indent)


def visible(text: str) -> str:
    """Text whose blanks at the edges and control characters can be seen, and can harm no terminal."""
    shown = "".join(_visible_character(character) for character in text)
    stripped = shown.strip(" ")
    left = len(shown) - len(shown.lstrip(" "))
    right = len(shown) - left - len(stripped)
    return "·" * left + stripped + "·" * right


def _visible_character(character: str) -> str:
    if character == "\n":
        return "↵"
    if character == "\t":
        return "⇥"
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


def human_bits(bits: int) -> str:
    """Bits as kB or MB of 1000 bytes, as hardware makers count."""
    size = bits / 8
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:,.1f} {unit}" if unit != "B" else f"{size:,.0f} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"
