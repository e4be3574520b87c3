"""From measurements to complete controllers: frozen policies of one stage or of both (Algorithm 1, lines 3 to 9)."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib.metadata import version
from typing import Any

import numpy as np
from jaxtyping import Float, Int8

from calibration.algorithm import Reference, maps, reference_ratio, reserve
from calibration.buckets import Keys
from calibration.interventions import Stage
from jaxkv.grammar.prompt_labels import PROMPT_LABELS
from jaxkv.policies.pask.frozen_policy import FrozenPolicy, ModelKey, Reserve
from jaxkv.policies.pask.table import Entry
from jaxkv.state.actions import HIGH
from jaxkv.state.payload import Costs

Thresholds = tuple[Fraction, Fraction]


@dataclass(frozen=True, eq=False)
class Controller:
    """One point of a greedy path with the floors it came from.

    Fields:
        thresholds: the first pair (tau_low, tau_high) that gives these floors.
        upgrades: upgrades of the path that are applied, of `path_length`.
        nominal: payload of the reference trajectories (or prompts) over Full KV's: B_D (or B_P).
        reserve: of the decode stage.
    """

    stage: Stage
    thresholds: Thresholds
    upgrades: int
    path_length: int
    actions: Int8[np.ndarray, "Q C"]
    floors: Int8[np.ndarray, "Q C"]
    nominal: Fraction
    reserve: Reserve

    @property
    def name(self) -> str:
        low, high = self.thresholds
        return f"{low.numerator}-{low.denominator}.{high.numerator}-{high.denominator}.{self.upgrades}"


def path_controllers(
    stage: Stage,
    floor: Int8[np.ndarray, "Q C"],
    path: Sequence[Any],
    thresholds: Thresholds,
    reference: Reference,
    costs: Costs,
    *,
    horizon: int,
    quantile: Fraction,
    targets: Sequence[Fraction] | None,
) -> list[Controller]:
    """The controllers of a path: all of distinct cost, or for each target the last whose nominal ratio fits.

    The floors themselves are always among them. Reserves belong to the decode stage only.
    """
    points = [(n, actions, reference_ratio(actions, reference, costs)) for n, actions in enumerate(maps(floor, path))]
    if targets is None:
        chosen = {ratio: (n, actions, ratio) for n, actions, ratio in points}  # the last of equal cost: it keeps most
        kept = sorted(chosen.values(), key=lambda point: point[0])
    else:
        found = {0}
        for target in targets:
            found.update([max((n for n, _, ratio in points if ratio <= target), default=0)])
        kept = [points[n] for n in sorted(found)]
    none = Reserve(horizon=horizon, quantile=quantile)
    return [
        Controller(
            stage,
            thresholds,
            n,
            len(path),
            actions,
            floor,
            ratio,
            reserve(actions, floor, reference, costs, ratio, horizon, quantile) if stage == "decode" else none,
        )
        for n, actions, ratio in kept
    ]


def distinct(controllers: Sequence[Controller]) -> list[Controller]:
    """Each pair of actions and floors once, the first of them: they are one and the same controller."""
    seen: dict[tuple[bytes, bytes], Controller] = {}
    for one in controllers:
        seen.setdefault((one.actions.tobytes(), one.floors.tobytes()), one)
    return list(seen.values())


def entries(
    actions: Int8[np.ndarray, "Q C"], floors: Int8[np.ndarray, "Q C"], scores: Float[np.ndarray, "Q C 2"]
) -> list[tuple[Entry, ...]]:
    """Table rows by key."""
    return [
        tuple(
            Entry(int(base), int(floor), (float(score[0]), float(score[1])))
            for base, floor, score in zip(*row, strict=True)
        )
        for row in zip(actions, floors, scores, strict=True)
    ]


def all_high_entries(groups: int) -> tuple[Entry, ...]:
    return (Entry(HIGH, HIGH, (0.0, 0.0)),) * groups


def frozen_policy(
    name: str,
    note: str,
    keys: Keys,
    model: Any,
    like: FrozenPolicy,
    decode: tuple[Controller, Float[np.ndarray, "Q C 2"]] | None,
    prompt: tuple[Controller, Float[np.ndarray, "P C 2"]] | None,
) -> FrozenPolicy:
    """The policy of a decode and a prompt controller with their scores; None is all-high in that stage (D.8).

    Every tag gets the entry of its key; tags without one are left to the fallback.
    """
    groups = len(like.groups)
    if decode is None:
        table = {"/".join(tag): all_high_entries(groups) for tag in keys.vocabulary.tags}
        budget, reserved = Fraction(1), Reserve()
    else:
        controller, scores = decode
        rows = entries(controller.actions, controller.floors, scores)
        table = {
            "/".join(keys.vocabulary.tag(tag)): rows[key] for tag, key in enumerate(keys.of_tag) if key is not None
        }
        budget, reserved = controller.nominal, controller.reserve
    if prompt is None:
        labels: dict[str, tuple[Entry, ...]] = {label: all_high_entries(groups) for label in PROMPT_LABELS}
        prompt_budget = Fraction(1)
    else:
        controller, scores = prompt
        labels = dict(zip(PROMPT_LABELS, entries(controller.actions, controller.floors, scores), strict=True))
        prompt_budget = controller.nominal
    thresholds = {}
    for stage, chosen in (("decode", decode), ("prompt", prompt)):
        if chosen is not None:
            low, high = chosen[0].thresholds
            thresholds |= {f"{stage}_tau_low": str(low), f"{stage}_tau_high": str(high)}
    config = model.config
    return FrozenPolicy(
        name=name,
        calibrated=True,
        note=note,
        decode=table,
        prompt=labels,
        budget_decode=budget,
        budget_prompt=prompt_budget,
        xgrammar=version("xgrammar"),
        reserve=reserved,
        vocabulary=keys.vocabulary,
        boundaries=like.boundaries,
        model=ModelKey(model.fingerprint, config.num_layers, config.num_kv_heads, config.head_dim),
        sinks=like.sinks,
        window=like.window,
        thresholds=thresholds,
    )
