"""The prefill companion: a frozen plan of what to keep of the prompt (PASK §3.6, B.4), exact integers on the host."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxkv.policies.base import protect_prompt
from jaxkv.policies.pask.table import Entry
from jaxkv.state.actions import HIGH, LOW, RELEASE
from jaxkv.state.payload import Costs, scheduled_payload


class PromptPlan(NamedTuple):
    """Actions int8 [n, C] and what they cost, in bits.

    `floor_excess` is by how much floors and protected positions alone exceed the target T_P = B_P n C_full; they are
    kept all the same.
    """

    actions: np.ndarray
    payload: int
    target: Fraction
    floor_excess: Fraction


def resolve_labels(
    table: Mapping[str, tuple[Entry, ...]], names: Sequence[str], candidates: Sequence[tuple[int, ...]], groups: int
) -> tuple[tuple[tuple[Entry, ...], ...], Int[np.ndarray, "n"]]:
    """Entries for the labels of a prompt's tokens, and for each token the number of its entry.

    A token that crosses labels has the maximum over their bases and floors as its floor, and an upgrade only where its
    labels agree on the score (Eq. 12, B.1). A label without an entry is HIGH.

    Args:
      table: calibrated entries by label.
      names: the labels that `candidates` count through.
      candidates: the labels of each token, at least one.
      groups: layer groups.
    """
    unknown = (Entry(HIGH, HIGH, (math.nan, math.nan)),) * groups
    number: dict[tuple[int, ...], int] = {}
    rows: list[tuple[Entry, ...]] = []
    for labels in candidates:
        if labels in number:
            continue
        number[labels] = len(rows)
        found = [table.get(names[label], unknown) for label in labels]
        rows.append(found[0] if len(found) == 1 else tuple(map(_conservative, zip(*found, strict=True))))
    return tuple(rows), np.array([number[labels] for labels in candidates], np.int64)


def _conservative(entries: tuple[Entry, ...]) -> Entry:
    action = max(max(entry.base, entry.floor) for entry in entries)
    levels = zip(*(entry.scores for entry in entries), strict=True)
    first, second = (level[0] if len(set(level)) == 1 else math.nan for level in levels)
    return Entry(action, action, (first, second))


def plan_prompt(
    entries: tuple[tuple[Entry, ...], ...],
    labels: Int[np.ndarray, "n"],
    costs: Costs,
    budget: Fraction,
    window: int,
    sinks: int,
) -> PromptPlan:
    """From the floors, apply adjacent upgrades of (token, group) in descending score while the total fits T_P.

    `labels` indexes `entries`. Ties go by token position, then group, then level; the first upgrade that does not fit
    ends it. An upgrade L -> H that waits for its R -> L takes the lower of the two scores, which is where a greedy
    search would find it. A score of NaN is no upgrade. Base actions play no part: they are for tokens that cross
    labels.
    """
    groups = costs.num_groups
    floors = np.array([[entry.floor for entry in row] for row in entries], np.int8).reshape(-1, groups)
    scores = np.array([[entry.scores for entry in row] for row in entries], np.float64).reshape(-1, groups, 2)
    actions = protect_prompt(floors[labels], window, sinks)
    target = budget * len(labels) * costs.full
    start = scheduled_payload(costs, actions)

    score = scores[labels]  # [n, C, 2]
    released, low = actions == RELEASE, actions == LOW
    eligible = np.stack([released, released | low], -1)
    score[..., 1] = np.where(released, score.min(-1), score[..., 1])
    index = np.flatnonzero(eligible & ~np.isnan(score))  # counts tokens, then groups, then levels: the tie order
    index = index[np.argsort(-score.ravel()[index], kind="stable")]
    cost = np.array([(low, high - low) for low, high in zip(costs.low_units, costs.high_units, strict=True)], np.int64)
    spent = np.cumsum(cost.ravel()[index % cost.size])
    room = (target - start) / costs.unit
    taken = index[: np.searchsorted(spent, room.numerator // room.denominator, side="right")]
    np.add.at(actions.reshape(-1), taken // 2, 1)
    return PromptPlan(
        actions=actions,
        payload=scheduled_payload(costs, actions),
        target=target,
        floor_excess=max(Fraction(0), start - target),
    )
