"""PASK with a table of its own in every row: requests under different policies in one batch, one compiled program.

The tables are part of the policy's state, a pytree of per-row arrays like the ledger. Calibration runs its
interventions and controllers like this; what they share is the grammar, the window, the sinks and the model.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int8

from jaxkv.errors import PolicyError, RequestError
from jaxkv.grammar.tags import TagVocabulary
from jaxkv.policies.base import Labels, Needs, protect_prompt
from jaxkv.policies.pask.ledger import Ledger
from jaxkv.policies.pask.policy import MAX_TAGS, Pask
from jaxkv.policies.pask.step import step
from jaxkv.policies.pask.table import NO_SCORE, Table
from jaxkv.state.actions import HIGH
from jaxkv.state.payload import KVSpec


def pad_table(table: Table, states: int) -> Table:
    """The table with room for `states` reserves: shapes then depend on the vocabulary and `states` alone.

    Raises PolicyError for a table of more reserves.
    """
    missing = states - table.reserve.shape[0]
    if missing < 0:
        raise PolicyError(
            f"a table of {table.reserve.shape[0]} reserves does not fit rows of {states}; make PaskRows for more states"
        )
    pad = [(0, missing)]
    return table._replace(reserve=jnp.pad(table.reserve, pad), reserve_fraction=jnp.pad(table.reserve_fraction, pad))


def fixed_table(actions: Int8[np.ndarray, "N C"], like: Table) -> Table:
    """A table that gives every tag its action and never changes it: no promotion, no debt, no reserve.

    `actions` has a row for each tag of the vocabulary; unresolved tokens are HIGH. Costs come from `like`. A token with
    several candidates has the maximum over them (Eq. 12).
    """
    rows = np.concatenate([actions, np.full((1, actions.shape[1]), HIGH, np.int8)])
    ranks = np.full((*rows.shape, 2), NO_SCORE[0], np.int32)
    full = like.costs[:, HIGH].sum()
    return Table(
        base=jnp.asarray(rows, jnp.int8),
        floor=jnp.asarray(rows, jnp.int8),
        rank_min=jnp.asarray(ranks),
        rank_max=jnp.full_like(ranks, NO_SCORE[1]),
        critical=jnp.zeros(len(rows), bool),
        costs=like.costs,
        allowance=full.astype(jnp.int32),
        allowance_fraction=jnp.int32(0),
        denominator=jnp.int32(1),
        reserve=jnp.zeros(1, jnp.int32),
        reserve_fraction=jnp.zeros(1, jnp.int32),
    )


@dataclass(frozen=True, eq=False)
class FixedActions:
    """A request's own actions by tag and by prompt label, without a controller: an intervention (PASK §3.4).

    Args:
        name: of the intervention.
        like: a bound PASK policy of the grammar and model: window, sinks, costs.
        decode: action of every tag of the vocabulary, int8 [N, C].
        prompt: action of every prompt label, int8 [labels, C].
    """

    name: str
    like: Pask
    decode: Int8[np.ndarray, "N C"]
    prompt: Int8[np.ndarray, "labels C"]
    calibrated: bool = False

    @cached_property
    def table(self) -> Table:
        assert self.like.table is not None, "PaskRows checks that it is bound"
        return fixed_table(self.decode, self.like.table)

    @property
    def needs(self) -> Needs:
        return Needs(tags=True, labels=bool((self.prompt != self.prompt[0]).any()))

    @property
    def vocabulary(self) -> TagVocabulary:
        return self.like.vocabulary

    @property
    def window(self) -> int:
        return self.like.window

    @property
    def sinks(self) -> int:
        return self.like.sinks

    @property
    def groups(self) -> tuple[str, ...]:
        return self.like.groups

    @property
    def expected_actions(self) -> np.ndarray:
        """Nothing is expected: whoever runs interventions reserves the room (`Engine.reserve`)."""
        return np.zeros((2, len(self.groups)))

    def plan_prompt(self, prompt_length: int, labels: Labels | None = None) -> Int8[np.ndarray, "n C"]:
        """The labels' actions, the maximum over a token's candidates; sinks and the last window HIGH."""
        if labels is None:
            actions = np.repeat(self.prompt[:1], prompt_length, axis=0)
        else:
            actions = np.stack([self.prompt[list(candidates)].max(axis=0) for candidates in labels])
        return protect_prompt(actions, self.window, self.sinks)

    def encode(self, transition: Any) -> tuple[np.ndarray, int]:
        return self.like.encode(transition)[0], 0


@dataclass(frozen=True, eq=False)
class PaskRows:
    """The policy of an engine whose requests bring their own: bound `Pask` policies or `FixedActions`.

    Args:
        like: a PASK policy of the grammar; requests without a policy run under it.
        states: reserves that a request's table may have.
    """

    like: Pask
    states: int = 64

    max_tags = MAX_TAGS
    needs = Needs(tags=True, labels=True)

    @property
    def name(self) -> str:
        return f"rows of {self.like.name}"

    @property
    def calibrated(self) -> bool:
        return self.like.calibrated

    @property
    def vocabulary(self) -> TagVocabulary:
        return self.like.vocabulary

    @property
    def window(self) -> int:
        return self.like.window

    @property
    def sinks(self) -> int:
        return self.like.sinks

    @property
    def groups(self) -> tuple[str, ...]:
        return self.like.groups

    @property
    def boundaries(self) -> tuple[tuple[int, int], ...] | None:
        return self.like.boundaries

    @property
    def expected_actions(self) -> np.ndarray:
        return self.like.expected_actions

    def bind(self, spec: KVSpec, context: int, fingerprint: str | None = None) -> "PaskRows":
        return replace(self, like=self.like.bind(spec, context, fingerprint))

    def check_row_policy(self, policy: Any) -> None:
        """RequestError for a policy that cannot share a batch with this one."""
        if (
            getattr(policy, "table", None) is None
            if not isinstance(policy, FixedActions)
            else policy.like.table is None
        ):
            raise RequestError(f"the request's policy {policy.name!r} is not a bound PASK policy; bind it to the model")
        for field in ("vocabulary", "window", "sinks", "groups"):
            if getattr(policy, field) != getattr(self, field):
                raise RequestError(
                    f"the request's policy {policy.name!r} has {field} {getattr(policy, field)}, and the engine's "
                    f"{getattr(self, field)}; run it in an engine of its own"
                )
        if policy.table.reserve.shape[0] > self.states:
            raise RequestError(
                f"the request's policy {policy.name!r} has {policy.table.reserve.shape[0]} reserves, and the engine's "
                f"rows {self.states}; make PaskRows with states={policy.table.reserve.shape[0]}"
            )

    def init(self, rows: int) -> tuple[Table, Ledger]:
        table = self._padded(self.like.table)
        tables = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape)).copy(), table)
        return tables, Ledger(tables.allowance, tables.allowance_fraction)

    def reset_row(self, policy_state: tuple[Table, Ledger], row: Any) -> tuple[Table, Ledger]:
        return _load(policy_state, row, self._padded(self.like.table))

    def load_row(self, policy_state: tuple[Table, Ledger], row: Any, policy: Any) -> tuple[Table, Ledger]:
        """The state with one row under the table of `policy`, its ledger opened."""
        return _load(policy_state, row, self._padded(policy.table))

    def plan_prompt(self, prompt_length: int, labels: Labels | None = None) -> Int8[np.ndarray, "n C"]:
        return self.like.plan_prompt(prompt_length, labels)

    def encode(self, transition: Any) -> tuple[np.ndarray, int]:
        return self.like.encode(transition)

    @property
    def step(self) -> Any:
        """One function for all of them: engines that differ in nothing else share compiled programs."""
        return step_rows

    def _padded(self, table: Table | None) -> Table:
        if table is None:
            raise PolicyError(f"policy {self.name!r} is not bound to a model; call policy.bind(spec, context) first")
        return pad_table(table, self.states)


def step_rows(
    policy_state: tuple[Table, Ledger],
    tag_ids: Int[Array, "B U"],
    parser_state: Int[Array, "B"],
    active: Bool[Array, "B"],
) -> tuple[Int8[Array, "B C"], tuple[Table, Ledger]]:
    """`pask.step.step` in every row, under the row's own table."""
    tables, ledger = policy_state
    actions, ledger = jax.vmap(_row_step)(tables, ledger, tag_ids, parser_state, active)
    return actions, (tables, ledger)


def _row_step(table: Table, ledger: Ledger, tag_ids: Array, parser_state: Array, active: Array) -> tuple[Array, Ledger]:
    one = jax.tree.map(lambda x: x[None], (ledger, tag_ids, parser_state, active))
    actions, ledger = step(table, *one)
    return actions[0], jax.tree.map(lambda x: x[0], ledger)


@jax.jit
def _load(policy_state: tuple[Table, Ledger], row: Any, table: Table) -> tuple[Table, Ledger]:
    tables, ledger = policy_state
    tables = jax.tree.map(lambda x, new: x.at[row].set(new), tables, table)
    balance = ledger.balance.at[row].set(table.allowance)
    return tables, Ledger(balance, ledger.fraction.at[row].set(table.allowance_fraction))
