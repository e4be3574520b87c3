"""Full KV: every token HIGH in every layer group, the reference of every comparison."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int8

from jaxkv.policies.base import DEFAULT_SINKS, DEFAULT_WINDOW, PADDING_TAG, Labels, Needs
from jaxkv.state.actions import HIGH
from jaxkv.state.payload import GROUP_NAMES, KVSpec


@dataclass(frozen=True)
class FullKV:
    """Keeps everything. It needs no grammar, holds no state and fits any model.

    `window` and `sinks` change nothing of what is kept, only where the state holds it.
    """

    window: int = DEFAULT_WINDOW
    sinks: int = DEFAULT_SINKS
    name: str = "full"
    calibrated: bool = True
    needs: Needs = field(default_factory=Needs)
    vocabulary: None = None
    groups: tuple[str, ...] = GROUP_NAMES
    boundaries: None = None
    max_tags: int = 1

    @property
    def expected_actions(self) -> np.ndarray:
        return np.repeat([[1.0], [0.0]], len(self.groups), axis=1)

    def bind(self, spec: KVSpec, context: int, fingerprint: str | None = None) -> "FullKV":
        names = GROUP_NAMES if spec.num_groups == len(GROUP_NAMES) else tuple(map(str, range(spec.num_groups)))
        return replace(self, groups=names)

    def init(self, rows: int) -> tuple[()]:
        return ()

    def reset_row(self, policy_state: tuple[()], row: Any) -> tuple[()]:
        return policy_state

    def plan_prompt(self, prompt_length: int, labels: Labels | None = None) -> Int8[np.ndarray, "n C"]:
        return np.full((prompt_length, len(self.groups)), HIGH, np.int8)

    def encode(self, transition: Any) -> tuple[np.ndarray, int]:
        return np.full(self.max_tags, PADDING_TAG, np.int32), 0

    def step(
        self,
        policy_state: tuple[()],
        tag_ids: Int[Array, "B U"],
        parser_state: Int[Array, "B"],
        active: Bool[Array, "B"],
    ) -> tuple[Int8[Array, "B C"], tuple[()]]:
        return jnp.full((active.shape[0], len(self.groups)), HIGH, jnp.int8), policy_state
