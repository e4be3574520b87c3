"""Algorithm 1 of PASK as arithmetic: floors, priorities, greedy paths, reserve, selection (§3.4, B.6).

Everything here works on measurements that others made, on the host, and is exact where a decision depends on it:
failures are counts and tolerances are fractions, because 1 failure in 200 has to be within 0.5 %.

A bucket is a pair (key, layer group); arrays have leading axes [Q, C]. Its place in them is the tie order.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations_with_replacement
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Int8

from jaxkv.errors import PolicyError
from jaxkv.policies.pask.frozen_policy import Reserve
from jaxkv.state.actions import HIGH, LOW, RELEASE
from jaxkv.state.payload import Costs

TOLERANCES: Final = tuple(Fraction(n, 400) for n in (0, 1, 2, 4, 8, 12, 20))
"""0, 0.25, 0.5, 1, 2, 3 and 5 %: what the threshold pairs are made of."""
THRESHOLDS: Final = tuple(combinations_with_replacement(TOLERANCES, 2))
"""The 28 pairs (tau_low, tau_high) with tau_low <= tau_high."""
DEFAULT_THRESHOLDS: Final = (Fraction(1, 200), Fraction(1, 100))


class Upgrade(NamedTuple):
    """One step of a greedy path: bucket (key, group) goes from action `level` to the next."""

    key: int
    group: int
    level: int


@dataclass(frozen=True)
class Reference:
    """Reference trajectories: what the all-high policy generated for the calibration requests, stop tokens left out.

    Fields:
        candidates: for each kind of token, the keys that its transition may belong to; none at all is unresolved, and
            HIGH in every group (§3.3).
        kinds: for each request, the kind of each token, int [T_r].
        states: for each request, the parser state after each token, int [T_r].
        state_names: names of the parser states, by number.
    """

    candidates: tuple[tuple[int, ...], ...]
    kinds: tuple[np.ndarray, ...]
    states: tuple[np.ndarray, ...]
    state_names: tuple[str, ...]

    @property
    def tokens(self) -> int:
        return sum(len(kinds) for kinds in self.kinds)

    def counts(self, keys: int) -> Int[np.ndarray, "Q"]:
        """How many tokens of all requests have each key among their candidates."""
        found = np.zeros(keys, np.int64)
        for kind, number in enumerate(self.kind_counts()):
            found[list(self.candidates[kind])] += number
        return found

    def kind_counts(self) -> Int[np.ndarray, "M"]:
        """Tokens of each kind over all requests."""
        every = np.concatenate([np.zeros(0, np.int64), *self.kinds]).astype(np.int64)
        return np.bincount(every, minlength=len(self.candidates))

    def resolve(self, actions: Int8[np.ndarray, "Q C"]) -> Int8[np.ndarray, "M C"]:
        """The action of each kind of token: the maximum over its candidates (Eq. 12)."""
        return np.stack(
            [
                actions[list(keys)].max(axis=0) if keys else np.full(actions.shape[1], HIGH, np.int8)
                for keys in self.candidates
            ]
        )


def envelope(failures: Int[np.ndarray, "Q C 2"]) -> Int[np.ndarray, "Q C 3"]:
    """Failures that releasing, halving or keeping a bucket adds, ordered by protection (Eq. 5).

    `failures` holds, for R and L, how many more calibration requests fail than under the all-high policy; it may be
    negative.
    """
    low = np.maximum(failures[..., 1], 0)
    released = np.maximum(low, failures[..., 0])
    return np.stack([released, low, np.zeros_like(low)], axis=-1)


def floors(
    sensitivity: Int[np.ndarray, "Q C 3"], requests: int, thresholds: tuple[Fraction, Fraction]
) -> Int8[np.ndarray, "Q C"]:
    """The least action whose sensitivity a threshold pair (tau_low, tau_high) tolerates (Eq. 6).

    `sensitivity` is `envelope`'s, in failures of `requests`.
    """
    tau_low, tau_high = thresholds
    if not 0 <= tau_low <= tau_high:
        raise PolicyError(f"thresholds ({tau_low}, {tau_high}) are not 0 <= tau_low <= tau_high")
    # An integer exceeds a fraction exactly where it exceeds the fraction's floor.
    high = sensitivity[..., LOW] > math.floor(tau_high * requests)
    released = sensitivity[..., RELEASE] <= math.floor(tau_low * requests)
    return np.where(high, HIGH, np.where(released, RELEASE, LOW)).astype(np.int8)


def priorities(
    distortion: Float[np.ndarray, "Q C 2"], counts: Int[np.ndarray, "Q"], requests: int, costs: Costs
) -> Float[np.ndarray, "Q C 2"]:
    """Distortion that the upgrades R -> L and L -> H save, per bit of payload that they add (Eq. 8).

    `distortion` is D(q, R) and D(q, L), per request (Eq. 7); `counts` how often a key occurs in all `requests`.
    A key that never occurs has priority 0.
    """
    steps = np.stack([distortion[..., 0] - distortion[..., 1], distortion[..., 1]], axis=-1)
    bits = np.array([(low, high - low) for low, high in zip(costs.low, costs.high, strict=True)], np.float64)
    payload = (counts / requests)[:, None, None] * bits
    return np.divide(np.maximum(steps, 0.0), payload, out=np.zeros_like(steps), where=payload > 0)


def round_robin(keys: int, groups: int) -> Float[np.ndarray, "Q C 2"]:
    """Scores that upgrade in a fixed order: R -> L before L -> H, and in each the layer groups in turn (4.3)."""
    order = [(level, key, group) for level in (0, 1) for key in range(keys) for group in range(groups)]
    scores = np.zeros((keys, groups, 2))
    for place, (level, key, group) in enumerate(order):
        scores[key, group, level] = len(order) - place
    return scores


def greedy_path(floor: Int8[np.ndarray, "Q C"], scores: Float[np.ndarray, "Q C 2"]) -> tuple[Upgrade, ...]:
    """The upgrades from the floors to all-high, each the eligible one of the largest score (A.4).

    L -> H of a bucket is eligible once it is at L. Scores of zero are eligible; ties go by key, group and level.
    """
    queue: list[tuple[float, Upgrade]] = []

    def offer(key: int, group: int, level: int) -> None:
        if level < HIGH:
            heapq.heappush(queue, (-float(scores[key, group, level]), Upgrade(key, group, level)))

    for key, group in np.ndindex(floor.shape):
        offer(key, group, int(floor[key, group]))
    path = []
    while queue:
        _, upgrade = heapq.heappop(queue)
        path.append(upgrade)
        offer(upgrade.key, upgrade.group, upgrade.level + 1)
    return tuple(path)


def maps(floor: Int8[np.ndarray, "Q C"], path: Sequence[Upgrade]) -> Iterator[Int8[np.ndarray, "Q C"]]:
    """The nested action maps of a path, the floors first (Eq. 20)."""
    actions = floor.copy()
    yield actions.copy()
    for key, group, level in path:
        actions[key, group] = level + 1
        yield actions.copy()


def reference_ratio(actions: Int8[np.ndarray, "Q C"], reference: Reference, costs: Costs) -> Fraction:
    """Payload of the reference trajectories under an action map, over Full KV's: a candidate's nominal B_D (Eq. 21)."""
    if not reference.tokens:
        raise PolicyError("the reference trajectories have no token; calibrate on requests whose answers have some")
    paid = sum(
        int(number) * sum(costs.of(group, int(action)) for group, action in enumerate(row))
        for number, row in zip(reference.kind_counts(), reference.resolve(actions), strict=True)
    )
    return Fraction(paid, reference.tokens * costs.full)


def reserve(
    actions: Int8[np.ndarray, "Q C"],
    floor: Int8[np.ndarray, "Q C"],
    reference: Reference,
    costs: Costs,
    budget: Fraction,
    horizon: int = 8,
    quantile: Fraction = Fraction(4, 5),
) -> Reserve:
    """Gamma of every parser state: what the next tokens' floors may cost beyond their allowance (Eqs. 10, 16).

    For each position u of a reference trajectory, the largest excess over the prefixes of the next `horizon` tokens;
    for each state, the value of rank ceil(quantile N) among its N positions; pooled over all for states not seen. A
    token with several candidates counts the floor that the controller gives it, the maximum over bases and floors
    (Eq. 12). A value is kept as (F, h), F in units of C_full, which carries over to another model's costs.
    """
    effective = reference.resolve(floor)
    several = np.array([len(keys) != 1 for keys in reference.candidates], bool)
    effective[several] = reference.resolve(np.maximum(actions, floor))[several]
    cost = [sum(costs.of(group, int(action)) for group, action in enumerate(row)) for row in effective]
    samples: dict[int, list[tuple[Fraction, int, int]]] = {}
    allowance = budget * costs.full
    for kinds, states in zip(reference.kinds, reference.states, strict=True):
        paid = [cost[kind] for kind in kinds]
        for u, state in enumerate(states):
            best, total = (Fraction(0), 0, 0), 0
            for h, price in enumerate(paid[u + 1 : u + 1 + horizon], start=1):
                total += price
                if total - h * allowance > best[0]:
                    best = (total - h * allowance, total, h)
            samples.setdefault(int(state), []).append(best)

    def rank(values: list[tuple[Fraction, int, int]]) -> tuple[Fraction, int]:
        _, total, h = sorted(values)[max(0, math.ceil(quantile * len(values)) - 1)]
        return Fraction(total, costs.full), h

    pooled = [value for values in samples.values() for value in values]
    return Reserve(
        horizon=horizon,
        quantile=quantile,
        states={reference.state_names[state]: rank(values) for state, values in sorted(samples.items())},
        pooled=rank(pooled) if pooled else (Fraction(0), 0),
    )


class Outcome(NamedTuple):
    """A complete controller on the development split: requests that failed, and payload over Full KV's (Eq. 2)."""

    failures: int
    ratio: Fraction


def select(outcomes: Sequence[Outcome], control: Outcome, requests: int, tolerance: Fraction) -> int | None:
    """The cheapest controller whose failure rate exceeds the all-high `control`'s by at most `tolerance` (Eq. 9).

    Ties go to fewer failures, then to the earlier. None is the control itself: nothing cheaper is within tolerance.
    """
    limit = control.failures + math.floor(tolerance * requests)
    fit = [i for i, outcome in enumerate(outcomes) if outcome.failures <= limit and outcome.ratio < control.ratio]
    return min(fit, key=lambda i: (outcomes[i].ratio, outcomes[i].failures, i), default=None)


def select_within(outcomes: Sequence[Outcome], budget: Fraction) -> int | None:
    """The controller with the fewest failures among those of a ratio up to `budget`; ties go to the cheaper.

    None where no controller is that cheap.
    """
    fit = [i for i, outcome in enumerate(outcomes) if outcome.ratio <= budget]
    return min(fit, key=lambda i: (outcomes[i].failures, outcomes[i].ratio, i), default=None)
