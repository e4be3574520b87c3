"""Algorithm 2 for a batch of rows: lookup, floor, demote, promote, charge (PASK §3.5).

No sort and no loop: each group offers at most two adjacent changes, and a change's place in the order is found by
comparing it with the 2C - 1 others. An upgrade or downgrade that only becomes available after another of the same
group cannot come before it, so its effective score is the later of the two: the greedy order and the order of
effective scores are the same.

Ties are broken by layer group, then by level in the order in which the levels of a group are passed (`TIE_ORDER`).
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int8

from jaxkv.policies.base import PADDING_TAG
from jaxkv.policies.pask.ledger import Ledger, settle, spendable
from jaxkv.policies.pask.table import NO_SCORE, Table
from jaxkv.state.actions import HIGH, LOW, RELEASE


def step(
    table: Table,
    ledger: Ledger,
    tag_ids: Int[Array, "B U"],
    parser_state: Int[Array, "B"],
    active: Bool[Array, "B"],
) -> tuple[Int8[Array, "B C"], Ledger]:
    """Actions of one accepted token in each row, and the ledger after it.

    `tag_ids` holds all candidate tags of the token, padded with -1; -2 is an unresolved tag, HIGH everywhere.
    `parser_state` indexes the reserve of the state after acceptance. Rows that are not active, and rows without a tag
    (stop tokens), are not charged, keep their ledger and get RELEASE. Work per token does not depend on history.
    """
    action, floor, ranks, unique, critical, tagged = lookup(table, tag_ids)
    charged = active & tagged
    budget = spendable(table, ledger, parser_state)
    action = demote(table.costs, action, floor, ranks, budget)
    promoted = promote(table.costs, action, ranks, unique, budget)
    action = jnp.where(critical[:, None], promoted, action)
    action = jnp.where(charged[:, None], action, RELEASE)
    ledger = settle(table, ledger, payload(table.costs, action), charged)
    return action.astype(jnp.int8), ledger


def payload(costs: Int[Array, "C 3"], action: Int[Array, "B C"]) -> Int[Array, "B"]:
    """M(a) = sum over groups of m(a_c, c), in cost units."""
    return jnp.take_along_axis(costs[None], action[..., None], axis=2)[..., 0].sum(1)


def lookup(
    table: Table, tag_ids: Int[Array, "B U"]
) -> tuple[
    Int[Array, "B C"],
    Int[Array, "B C"],
    Int[Array, "B C 2"],
    Bool[Array, "B C 2"],
    Bool[Array, "B"],
    Bool[Array, "B"],
]:
    """Initial action max(a0, a-), floor, score ranks, whether each score is unique, Crit(z), and whether there is any
    tag.

    Several candidates give the maximum over their bases and floors, as action and floor alike (Eq. 12); the token is
    critical when one candidate is.
    """
    given = tag_ids != PADDING_TAG
    # Negative ids count from the end of the rows in JAX: -2 has to name the last one.
    rows = jnp.where(tag_ids < 0, table.base.shape[0] - 1, tag_ids)
    each = given[..., None]
    base = jnp.where(each, table.base[rows], RELEASE).max(1).astype(jnp.int32)
    floor = jnp.where(each, table.floor[rows], RELEASE).max(1).astype(jnp.int32)
    rank_min = jnp.where(each[..., None], table.rank_min[rows], NO_SCORE[0]).min(1)
    rank_max = jnp.where(each[..., None], table.rank_max[rows], NO_SCORE[1]).max(1)
    action = jnp.maximum(base, floor)
    several = given.sum(1) > 1
    floor = jnp.where(several[:, None], action, floor)
    critical = (given & table.critical[rows]).any(1)
    # Where no score is unique, nothing may be reordered by it; rank 0 only keeps the arithmetic in range.
    unique = rank_min == rank_max
    return action, floor, jnp.where(unique, rank_min, 0), unique, critical, given.any(1)


def demote(
    costs: Int[Array, "C 3"],
    action: Int[Array, "B C"],
    floor: Int[Array, "B C"],
    ranks: Int[Array, "B C 2"],
    budget: Int[Array, "B"],
) -> Int[Array, "B C"]:
    """Undo upgrades in ascending score, H -> L before L -> R of a group, until the total fits or floors remain."""
    to_low = (action == HIGH) & (floor < HIGH)
    to_release = (action >= LOW) & (floor < LOW)
    rank_low = ranks[..., 1]
    rank_release = jnp.where(to_low, jnp.maximum(ranks[..., 1], ranks[..., 0]), ranks[..., 0])
    eligible, saving, order = _changes(
        (to_low, costs[:, HIGH] - costs[:, LOW], rank_low),
        (to_release, costs[:, LOW] - costs[:, RELEASE], rank_release),
    )
    before = (order[:, None, :] < order[:, :, None]) & eligible[:, None, :]
    saved = jnp.where(before, saving, 0).sum(2)
    taken = eligible & (payload(costs, action)[:, None] - saved > budget[:, None])
    return action - _per_group(taken)


def promote(
    costs: Int[Array, "C 3"],
    action: Int[Array, "B C"],
    ranks: Int[Array, "B C 2"],
    unique: Bool[Array, "B C 2"],
    budget: Int[Array, "B"],
) -> Int[Array, "B C"]:
    """Apply upgrades in descending score while the total fits; the first that does not fit ends it."""
    to_low = (action == RELEASE) & unique[..., 0]
    to_high = ((action == LOW) | to_low) & unique[..., 1]
    rank_low = -ranks[..., 0]
    rank_high = jnp.where(to_low, jnp.maximum(-ranks[..., 0], -ranks[..., 1]), -ranks[..., 1])
    eligible, cost, order = _changes(
        (to_low, costs[:, LOW] - costs[:, RELEASE], rank_low), (to_high, costs[:, HIGH] - costs[:, LOW], rank_high)
    )
    through = (order[:, None, :] <= order[:, :, None]) & eligible[:, None, :]
    spent = payload(costs, action)[:, None] + jnp.where(through, cost, 0).sum(2)
    return action + _per_group(eligible & (spent <= budget[:, None]))


def _changes(*levels: tuple) -> tuple[Bool[Array, "B E"], Int[Array, "E"], Int[Array, "B E"]]:
    """Adjacent changes E = 2C, group by group: eligibility, cost, and a distinct sort key (rank, group, level)."""
    eligible = jnp.stack([level[0] for level in levels], -1)
    cost = jnp.stack([level[1] for level in levels], -1)
    rank = jnp.stack([level[2] for level in levels], -1)
    rows, size = eligible.shape[0], cost.size
    order = rank.reshape(rows, size) * size + jnp.arange(size, dtype=jnp.int32)
    return eligible.reshape(rows, size), cost.reshape(size), order


def _per_group(taken: Bool[Array, "B E"]) -> Int[Array, "B C"]:
    return taken.reshape(taken.shape[0], -1, 2).sum(2)
