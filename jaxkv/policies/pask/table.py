"""The frozen table as the device sees it: one resolved row for every tag of the vocabulary (PASK B.1).

A tag that calibration never saw is resolved here, on the host, once: its row is the conservative maximum over the
calibrated tags that share the longest prefix (class, role, state) -> (class, role) -> (class), or HIGH. Nothing is
searched while decoding.

Scores enter as dense integer ranks, so that "higher", "equal" and "unique" mean the same on every device, in any float
width.
"""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int8

from jaxkv.errors import PolicyError
from jaxkv.state.actions import HIGH
from jaxkv.state.payload import Costs

INT32_MAX = 2**31 - 1
NO_SCORE = (INT32_MAX, -1)  # smallest and largest rank over no score at all: never equal, hence never unique


class Entry(NamedTuple):
    """One calibrated bucket: base action, protection floor, and the scores of the upgrades R -> L and L -> H (A.2)."""

    base: int
    floor: int
    scores: tuple[float, float]


class Table(NamedTuple):
    """Device constants of one policy for one model. Rows N: the tags of the vocabulary in order, then one unresolved
    row.

    Costs are in units of `Costs.unit` bits. `rank_min` and `rank_max` are the ranks of the smallest and the largest
    calibrated score behind a row: equal where that score is unique. Fractions are numerators over `denominator`.
    """

    base: Int8[Array, "N C"]
    floor: Int8[Array, "N C"]
    rank_min: Int[Array, "N C 2"]
    rank_max: Int[Array, "N C 2"]
    critical: Bool[Array, "N"]
    costs: Int[Array, "C 3"]
    allowance: Int[Array, ""]
    allowance_fraction: Int[Array, ""]
    denominator: Int[Array, ""]
    reserve: Int[Array, "P"]
    reserve_fraction: Int[Array, "P"]


def prefixes(tag: str) -> Iterator[str]:
    """Ever shorter prefixes of "class/role/state/next", itself left out: the fallback chain of B.1."""
    parts = tag.split("/")
    for length in range(len(parts) - 1, 0, -1):
        yield "/".join(parts[:length])


def descendants(entries: Mapping[str, tuple[Entry, ...]], prefix: str) -> list[tuple[Entry, ...]]:
    return [entry for tag, entry in entries.items() if tag == prefix or tag.startswith(prefix + "/")]


def fallback_actions(entries: Mapping[str, tuple[Entry, ...]]) -> dict[str, tuple[int, ...]]:
    """Action of each group, base and floor alike (Eq. 12), for every prefix that has calibrated descendants."""
    known = sorted({prefix for tag in entries for prefix in prefixes(tag)})
    return {
        prefix: tuple(
            max(max(entry.base, entry.floor) for entry in group)
            for group in zip(*descendants(entries, prefix), strict=True)
        )
        for prefix in known
    }


def resolve(
    entries: Mapping[str, tuple[Entry, ...]], fallback: Mapping[str, tuple[int, ...]], tag: str, num_groups: int
) -> tuple[tuple[int, ...], tuple[int, ...], list[list[list[float]]]]:
    """Base and floor of a tag in each group, and the calibrated scores behind it as [group][upgrade] -> list.

    `fallback` is `fallback_actions(entries)`.
    """
    if tag in entries:
        found = entries[tag]
        return tuple(e.base for e in found), tuple(e.floor for e in found), [[[s] for s in e.scores] for e in found]
    for prefix in prefixes(tag):
        if prefix in fallback:
            groups = zip(*descendants(entries, prefix), strict=True)
            scores = [[[entry.scores[level] for entry in group] for level in (0, 1)] for group in groups]
            return fallback[prefix], fallback[prefix], scores
    return (HIGH,) * num_groups, (HIGH,) * num_groups, [[[], []] for _ in range(num_groups)]


def is_critical(tag: str) -> bool:
    """Crit(z) of Algorithm 2: the tag is critical, or the grammar approaches a critical region."""
    _, _, state, following = tag.split("/")
    return state == "critical" or following == "lookahead_critical"


def build_table(
    entries: Mapping[str, tuple[Entry, ...]],
    tags: tuple[str, ...],
    costs: Costs,
    budget: Fraction,
    reserves: tuple[tuple[Fraction, int], ...],
    context: int,
    name: str,
) -> Table:
    """Compile the frozen entries for a model's costs.

    `tags` names the vocabulary in id order. Each reserve (F, h) means Gamma = [F * C_full - h * b]+ (Eq. 16) with
    b = `budget` * C_full; F * C_full is rounded up to a unit, which changes nothing for the model that the policy was
    calibrated on. The last reserve is the pooled one. Raises PolicyError when int32 cannot hold the ledger of `context`
    tokens.
    """
    allowance = budget * costs.full_units
    gammas = [max(Fraction(0), Fraction(-(-f * costs.full_units // 1)) - h * allowance) for f, h in reserves]
    _check_range(allowance, max(gammas), costs, context, name)

    rank = {score: i for i, score in enumerate(sorted({s for e in entries.values() for g in e for s in g.scores}))}
    fallback = fallback_actions(entries)
    base, floor, ranks = [], [], []
    for tag in (*tags, "unresolved/unresolved/unresolved/unresolved"):
        tag_base, tag_floor, scores = resolve(entries, fallback, tag, costs.num_groups)
        base.append(tag_base)
        floor.append(tag_floor)
        ranks.append([[_rank_range([rank[s] for s in level]) for level in group] for group in scores])
    ranks = np.array(ranks, np.int32)  # [N, C, 2, min and max]
    denominator = allowance.denominator
    whole = [gamma.numerator // gamma.denominator for gamma in gammas]
    return Table(
        base=jnp.array(base, jnp.int8),
        floor=jnp.array(floor, jnp.int8),
        rank_min=jnp.array(ranks[..., 0]),
        rank_max=jnp.array(ranks[..., 1]),
        critical=jnp.array([is_critical(tag) for tag in tags] + [False]),
        costs=jnp.array(
            [(0, low, high) for low, high in zip(costs.low_units, costs.high_units, strict=True)], jnp.int32
        ),
        allowance=jnp.array(allowance.numerator // denominator, jnp.int32),
        allowance_fraction=jnp.array(allowance.numerator % denominator, jnp.int32),
        denominator=jnp.array(denominator, jnp.int32),
        reserve=jnp.array(whole, jnp.int32),
        reserve_fraction=jnp.array(
            [int((gamma - w) * denominator) for gamma, w in zip(gammas, whole, strict=True)], jnp.int32
        ),
    )


def _rank_range(ranks: list[int]) -> tuple[int, int]:
    return (min(ranks), max(ranks)) if ranks else NO_SCORE


def _check_range(allowance: Fraction, reserve: Fraction, costs: Costs, context: int, name: str) -> None:
    """The balance moves by at most one full token up or down a step; the widest excursion must stay within int32."""
    widest = (context + 1) * max(costs.full_units, int(allowance) + 1) + int(reserve) + 1
    if widest > INT32_MAX:
        raise PolicyError(
            f"policy {name!r}: the ledger may reach {widest:,} units of {costs.unit} bits within a context of "
            f"{context:,} tokens ({costs.full_units:,} units each), beyond int32's {INT32_MAX:,}; use a shorter context"
        )
    if 2 * allowance.denominator > INT32_MAX:
        raise PolicyError(
            f"policy {name!r}: the allowance {allowance} units a token has the denominator {allowance.denominator:,}, "
            f"beyond int32's half, {INT32_MAX // 2:,}; use a decode budget with a smaller denominator"
        )
