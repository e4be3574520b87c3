"""The policy protocol: what a KV policy tells the engine, and what it may ask of it.

A policy is bound to a model's payload costs once (`bind`); everything after that works on the bound policy. Its state
is a pytree of per-row arrays, so that a rollback is: put the old state back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Bool, Int, Int8

from jaxkv.state.actions import HIGH
from jaxkv.state.payload import KVSpec

DEFAULT_WINDOW = 16
DEFAULT_SINKS = 4
PADDING_TAG = -1
Labels = Sequence[tuple[int, ...]]
"""Candidate labels of each token of a prompt, numbers in `grammar.prompt_labels.PROMPT_LABELS`."""


@dataclass(frozen=True)
class Needs:
    """What the engine must provide for a policy to work."""

    tags: bool = False
    """Structural tags of every accepted token, that is, a grammar constraint."""
    labels: bool = False
    """Semantic labels of every prompt token (`grammar.prompt_labels`)."""


@runtime_checkable
class Policy(Protocol):
    """Decides how long and how precisely each token's keys and values are kept.

    `window` newest tokens and the first `sinks` tokens are HIGH whatever the policy says. `groups` names the layer
    groups C that share actions; `max_tags` is U, the width of the tag-id vectors. `calibrated` is False for a policy
    whose values were set by hand.
    """

    @property
    def name(self) -> str: ...

    @property
    def calibrated(self) -> bool: ...

    @property
    def needs(self) -> Needs: ...

    @property
    def vocabulary(self) -> Any: ...

    @property
    def window(self) -> int: ...

    @property
    def sinks(self) -> int: ...

    @property
    def groups(self) -> tuple[str, ...]: ...

    @property
    def boundaries(self) -> tuple[tuple[int, int], ...] | None:
        """Layers (start, stop) of each group, or None for the model's thirds."""
        ...

    @property
    def max_tags(self) -> int: ...

    @property
    def expected_actions(self) -> np.ndarray:
        """Expected shares of generated tokens that become HIGH and LOW, [2, C]; they size the first allocation only."""
        ...

    def bind(self, spec: KVSpec, context: int, fingerprint: str | None = None) -> "Policy":
        """The policy for a model with these KV dimensions and at most `context` positions a request.

        `fingerprint` is the model's. Raises PolicyError when the policy was made for another model, or when its ledger
        could leave int32 within `context` tokens.
        """
        ...

    def init(self, rows: int) -> Any:
        """Fresh state of `rows` requests: a pytree of arrays with leading axis `rows`."""
        ...

    def reset_row(self, policy_state: Any, row: Any) -> Any:
        """The state with one row (int or traced scalar) as `init` makes it, for that row's next request. Jittable."""
        ...

    def plan_prompt(self, prompt_length: int, labels: Labels | None = None) -> Int8[np.ndarray, "n C"]:
        """Action of every prompt token and group, decided before the prompt pass; protected positions are HIGH.

        `labels` are each token's candidate labels, given where `needs.labels` asks for them.
        """
        ...

    def encode(self, transition: Any) -> tuple[np.ndarray, int]:
        """What the device needs to know of an accepted token: tag ids int32 [U], padded with -1, and the parser
        state's index.

        `transition` has `.tags` (candidate tag ids, empty for a stop token) and `.parser_state` (after acceptance).
        """
        ...

    def step(
        self,
        policy_state: Any,
        tag_ids: Int[Array, "B U"],
        parser_state: Int[Array, "B"],
        active: Bool[Array, "B"],
    ) -> tuple[Int8[Array, "B C"], Any]:
        """Actions of one token in each row, and the next state. Rows that are not active keep theirs. Jittable."""
        ...


def protect_prompt(actions: Int8[np.ndarray, "n C"], window: int, sinks: int) -> Int8[np.ndarray, "n C"]:
    """The plan with sinks and the last `window` tokens HIGH (PASK B.2), as a new array."""
    protected = actions.copy()
    protected[:sinks] = HIGH
    protected[max(len(actions) - window, 0) :] = HIGH
    return protected
