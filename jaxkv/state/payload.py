"""What a KV cache costs: the one place where payload is counted (PASK A.2, B.3, Eqs. 2, 13, 14).

Three figures, never mixed:

- *scheduled* payload: what the prompt plan keeps, mask-protected positions included (B.4), and what the decode ledger
  charges, the recent window not counted;
- *live* payload: what the partitions hold, window and sinks included, summed over decode steps;
- *allocated* bytes: every array of the state; measured by the engine and carried along.

Everything is an exact Python integer in bits. Sixteen bits are counted for a high value whatever `kv_dtype` stores.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int8

from jaxkv.errors import ModelError, RequestError
from jaxkv.state.actions import HIGH, LOW, RELEASE

GROUP_NAMES = ("lower", "middle", "upper")
HIGH_BITS = 16
LOW_BITS = 4
SCALE_BITS = 16


def layer_groups(num_layers: int) -> tuple[tuple[int, int], ...]:
    """Zero-based `(start, stop)` layer ranges of the lower, middle and upper group (PASK A.2).

    A model of fewer than three layers leaves the upper groups empty; they cost nothing.
    """
    if num_layers < 1:
        raise ModelError(f"{num_layers} layers cannot be grouped; a model has at least 1")
    first, second = (num_layers + 2) // 3, (2 * num_layers + 2) // 3
    return ((0, first), (first, second), (second, num_layers))


@dataclass(frozen=True)
class KVSpec:
    """What of a model decides its KV payload: full-attention layers, their KV heads, head width, and layer groups.

    `groups` are contiguous `(start, stop)` ranges that cover all layers in order; left empty, they are
    `layer_groups(num_layers)`.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    groups: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, field) < 1:
                raise ModelError(f"{field} = {getattr(self, field)}; a KV cache needs at least 1")
        if not self.groups:
            object.__setattr__(self, "groups", layer_groups(self.num_layers))
        edges = [edge for group in self.groups for edge in group]
        covers = edges[0] == 0 and edges[-1] == self.num_layers and edges[1:-1:2] == edges[2:-1:2]
        if not covers or edges != sorted(edges):
            raise ModelError(
                f"layer groups {self.groups} do not cover the {self.num_layers} layers in order, without gap or "
                f"overlap; leave them out for {layer_groups(self.num_layers)}"
            )

    @property
    def num_groups(self) -> int:
        return len(self.groups)


@dataclass(frozen=True)
class Costs:
    """Payload of one token in each layer group, in bits; `*_units` are the same divided by their gcd.

    `full` is C_full, the sum of `high` over the groups. A released token costs nothing.
    """

    low: tuple[int, ...]
    high: tuple[int, ...]

    @property
    def full(self) -> int:
        return sum(self.high)

    @property
    def unit(self) -> int:
        return math.gcd(*self.low, *self.high)

    @property
    def low_units(self) -> tuple[int, ...]:
        return tuple(cost // self.unit for cost in self.low)

    @property
    def high_units(self) -> tuple[int, ...]:
        return tuple(cost // self.unit for cost in self.high)

    @property
    def full_units(self) -> int:
        return self.full // self.unit

    @property
    def num_groups(self) -> int:
        return len(self.high)

    def of(self, group: int, action: int) -> int:
        """m(action, group) in bits."""
        return (0, self.low[group], self.high[group])[action]


def group_costs(spec: KVSpec) -> Costs:
    """m(L, c) and m(H, c) of every layer group (PASK Eqs. 13, 14; odd head widths pay 4 padding bits a row)."""
    low, high = [], []
    for start, stop in spec.groups:
        rows = 2 * (stop - start) * spec.num_kv_heads  # k_c: keys and values, each with one scale
        elements = rows * spec.head_dim  # n_c
        high.append(HIGH_BITS * elements)
        low.append(LOW_BITS * elements + SCALE_BITS * rows + LOW_BITS * rows * (spec.head_dim % 2))
    return Costs(low=tuple(low), high=tuple(high))


@dataclass(frozen=True)
class Cost:
    """Payload of one request, or of several added with `+`, in bits; `*_full` is the same for Full KV.

    Ratios are ratios of sums (PASK Eq. 2, D.8); a ratio of nothing is NaN. `allocated_bytes` is a peak: `+` keeps the
    larger.
    """

    prefill: int = 0
    prefill_full: int = 0
    decode: int = 0
    decode_full: int = 0
    live: int = 0
    live_full: int = 0
    allocated_bytes: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0

    @property
    def ratio_prefill(self) -> float:
        return _ratio(self.prefill, self.prefill_full)

    @property
    def ratio_decode(self) -> float:
        return _ratio(self.decode, self.decode_full)

    @property
    def ratio_total(self) -> float:
        """Scheduled prompt and decode payload over Full KV's: the headline figure."""
        return _ratio(self.prefill + self.decode, self.prefill_full + self.decode_full)

    @property
    def ratio(self) -> float:
        """The headline figure, `ratio_total`."""
        return self.ratio_total

    @property
    def ratio_live(self) -> float:
        return _ratio(self.live, self.live_full)

    def __add__(self, other: "Cost") -> "Cost":
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(
            prefill=self.prefill + other.prefill,
            prefill_full=self.prefill_full + other.prefill_full,
            decode=self.decode + other.decode,
            decode_full=self.decode_full + other.decode_full,
            live=self.live + other.live,
            live_full=self.live_full + other.live_full,
            allocated_bytes=max(self.allocated_bytes, other.allocated_bytes),
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            generated_tokens=self.generated_tokens + other.generated_tokens,
            decode_steps=self.decode_steps + other.decode_steps,
        )


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


def request_cost(
    costs: Costs,
    prompt_actions: Int8[np.ndarray, "n C"],
    decode_actions: Int8[np.ndarray, "t C"],
    window: int,
    sinks: int,
    allocated_bytes: int = 0,
) -> Cost:
    """Exact cost of one request from the actions of its prompt and of its generated non-stop tokens.

    `prompt_actions` already holds HIGH for sinks and for the prompt's last `window` tokens, so that the scheduled
    prompt payload includes them. Each generated non-stop token stands for one decode step, the one that computes its
    keys and values: token i of the answer is at absolute position p = n + i. The live payload of that step is what is
    held for positions <= p:

    - position p itself, in full (its KV is current);
    - positions p - window .. p - 1, in full (the recent window excludes the token being computed);
    - positions < sinks, in full;
    - every other position by its action.

    Full KV holds all p + 1 positions in full. The token that a length limit cuts off counts as a step like any other,
    in both.
    """
    for name, actions in (("prompt_actions", prompt_actions), ("decode_actions", decode_actions)):
        if actions.shape[1] != costs.num_groups:
            raise RequestError(
                f"{name} has {actions.shape[1]} layer groups, the costs have {costs.num_groups}; use one KVSpec"
            )
        if actions.size and (actions.min() < RELEASE or actions.max() > HIGH):
            raise RequestError(f"{name} holds {actions.min()}..{actions.max()}; actions are 0 release, 1 low, 2 high")
    prompt, steps = len(prompt_actions), len(decode_actions)
    length = prompt + steps

    actions = np.concatenate([prompt_actions, decode_actions])
    position = np.arange(length, dtype=np.int64)
    first_step = np.maximum(position, prompt)  # the first decode step that sees this position
    last_protected = np.where(position < sinks, length, position + window)
    seen = length - first_step
    protected = np.clip(np.minimum(last_protected, length - 1) - first_step + 1, 0, None)
    by_action = seen - protected

    live = int(protected.sum()) * costs.full
    for group in range(costs.num_groups):
        for action in (LOW, HIGH):
            live += int(by_action[actions[:, group] == action].sum()) * costs.of(group, action)
    return Cost(
        prefill=scheduled_payload(costs, prompt_actions),
        prefill_full=prompt * costs.full,
        decode=scheduled_payload(costs, decode_actions),
        decode_full=steps * costs.full,
        live=live,
        live_full=int(seen.sum()) * costs.full,
        allocated_bytes=allocated_bytes,
        prompt_tokens=prompt,
        generated_tokens=steps,
        decode_steps=steps,
    )


def scheduled_payload(costs: Costs, actions: Int8[np.ndarray, "n C"]) -> int:
    """Sum of m(a, c) over tokens and groups, in bits, exact."""
    return sum(
        int(np.count_nonzero(actions[:, group] == action)) * costs.of(group, action)
        for group in range(costs.num_groups)
        for action in (LOW, HIGH)
    )
