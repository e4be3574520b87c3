"""PASK as a policy: a frozen table, bound to a model's costs, that acts on structural tags."""

import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Int, Int8

from jaxkv.errors import PolicyError, RequestError
from jaxkv.grammar.tags import UNRESOLVED, TagVocabulary
from jaxkv.policies.base import PADDING_TAG, Labels, Needs
from jaxkv.policies.pask.frozen_policy import GRAMMARS, FrozenPolicy, tag_names
from jaxkv.policies.pask.ledger import Ledger, open_ledger, reopen_row
from jaxkv.policies.pask.prompt import PromptPlan, plan_prompt, resolve_labels
from jaxkv.policies.pask.step import step
from jaxkv.policies.pask.table import Table, build_table
from jaxkv.state.actions import HIGH, LOW
from jaxkv.state.payload import Costs, KVSpec, group_costs, layer_groups

MAX_TAGS = 16
_jitted_step = jax.jit(step)


@dataclass(frozen=True, eq=False)
class Pask:
    """A PASK policy (PASK §3.5, 3.6). `bind` compiles it for a model; only then can it plan and step.

    The bound policy's `table` is a pytree of device arrays whose shapes depend on the vocabulary and the number of
    parser states alone: `pask.step.step(table, ...)` compiled once serves every policy of one grammar.
    """

    frozen: FrozenPolicy
    transfer: bool = False
    costs: Costs | None = None
    table: Table | None = None

    max_tags = MAX_TAGS

    @property
    def needs(self) -> Needs:
        """Labels only where the prompt's table tells them apart."""
        return Needs(tags=True, labels=len(self.frozen.prompt) > 1)

    @property
    def name(self) -> str:
        return self.frozen.name

    @property
    def calibrated(self) -> bool:
        return self.frozen.calibrated

    @property
    def vocabulary(self) -> TagVocabulary:
        """jaxkv's vocabulary of the policy's grammar; tag ids index it."""
        return GRAMMARS[self.frozen.vocabulary.family]

    @property
    def window(self) -> int:
        return self.frozen.window

    @property
    def sinks(self) -> int:
        return self.frozen.sinks

    @property
    def groups(self) -> tuple[str, ...]:
        return self.frozen.groups

    @property
    def boundaries(self) -> tuple[tuple[int, int], ...] | None:
        return self.frozen.boundaries

    @property
    def expected_actions(self) -> np.ndarray:
        """Shares over the table's tags, each counted once."""
        entries = np.asarray([[max(e.base, e.floor) for e in groups] for groups in self.frozen.decode.values()])
        if not len(entries):
            return np.repeat([[1.0], [0.0]], len(self.groups), axis=1)
        return np.stack([(entries == kind).mean(axis=0) for kind in (HIGH, LOW)])

    def check_model(self, fingerprint: str | None, spec: KVSpec | None = None) -> None:
        """PolicyError (a warning under transfer) when the policy was made for another model than this one."""
        key = self.frozen.model
        found = []
        if fingerprint is not None and key.fingerprint not in (None, fingerprint):
            found.append(f"its model has the fingerprint {key.fingerprint}, and this one {fingerprint}")
        if spec is not None:
            for name in ("num_layers", "num_kv_heads", "head_dim"):
                if getattr(key, name) not in (None, getattr(spec, name)):
                    found.append(f"its model has {name} = {getattr(key, name)}, and this one {getattr(spec, name)}")
            groups = self.frozen.boundaries or layer_groups(spec.num_layers)
            if spec.groups != groups:
                found.append(f"its layer groups are {groups}, and this model's are {spec.groups}")
        report_differences(self.name, found, self.transfer)

    def bind(self, spec: KVSpec, context: int, fingerprint: str | None = None) -> "Pask":
        """The policy compiled for these KV dimensions: tables in reduced cost units, checked to stay within int32.

        Raises PolicyError for another model (a warning under transfer: scores keep their order and the reserve scales
        with C_full), and when the ledger could overflow within `context` tokens.
        """
        if spec.num_groups != len(self.groups):
            raise PolicyError(
                f"policy {self.name!r} has the layer groups {self.groups}, and this model {spec.num_groups} groups, "
                f"{spec.groups}; bind it to a KVSpec of {len(self.groups)} groups"
            )
        self.check_model(fingerprint, spec)
        costs, frozen = group_costs(spec), self.frozen
        table = build_table(
            frozen.decode,
            tag_names(self.vocabulary),
            costs,
            frozen.budget_decode,
            (*frozen.reserve.states.values(), frozen.reserve.pooled),
            context,
            self.name,
        )
        return replace(self, costs=costs, table=table)

    def init(self, rows: int) -> Ledger:
        return open_ledger(self._bound()[1], rows)

    def reset_row(self, policy_state: Ledger, row: Any) -> Ledger:
        return reopen_row(self._bound()[1], policy_state, row)

    def plan_prompt(self, prompt_length: int, labels: Labels | None = None) -> Int8[np.ndarray, "n C"]:
        return self.prompt_plan(prompt_length, labels).actions

    def prompt_plan(self, prompt_length: int, labels: Labels | None = None) -> PromptPlan:
        """The plan, its payload, target and floor excess; without labels all tokens are `protected_content` (A.3)."""
        costs, frozen = self._bound()[0], self.frozen
        if labels is not None and len(labels) != prompt_length:
            raise RequestError(f"{len(labels)} labels for a prompt of {prompt_length} tokens; give one for each token")
        candidates = ((0,),) * prompt_length if labels is None else labels
        entries, rows = resolve_labels(frozen.prompt, frozen.prompt_labels, candidates, costs.num_groups)
        return plan_prompt(entries, rows, costs, frozen.budget_prompt, frozen.window, frozen.sinks)

    def encode(self, transition: Any) -> tuple[np.ndarray, int]:
        """Tag ids int32 [U] padded with -1, and the index of the parser state's reserve, the pooled one if it has none.

        More than U candidates become one unresolved tag: HIGH, never less than Eq. 12's maximum.
        """
        tags = tuple(dict.fromkeys(transition.tags))
        size = self.vocabulary.size
        for tag in tags:
            if tag != UNRESOLVED and not 0 <= tag < size:
                raise RequestError(
                    f"tag id {tag} is outside the {size} tags of policy {self.name!r}'s vocabulary, "
                    f"{self.vocabulary.family}; use a constraint of that grammar"
                )
        if len(tags) > self.max_tags:
            tags = (UNRESOLVED,)
        ids = np.full(self.max_tags, PADDING_TAG, np.int32)
        ids[: len(tags)] = tags
        states = self.frozen.reserve.states
        return ids, self._states.get(transition.parser_state, len(states))

    def step(
        self,
        policy_state: Ledger,
        tag_ids: Int[Array, "B U"],
        parser_state: Int[Array, "B"],
        active: Bool[Array, "B"],
    ) -> tuple[Int8[Array, "B C"], Ledger]:
        return _jitted_step(self._bound()[1], policy_state, tag_ids, parser_state, active)

    @cached_property
    def _states(self) -> dict[str, int]:
        return {state: index for index, state in enumerate(self.frozen.reserve.states)}

    def _bound(self) -> tuple[Costs, Table]:
        if self.costs is None or self.table is None:
            raise PolicyError(
                f"policy {self.name!r} is not bound to a model; call policy.bind(spec, context) and use what it returns"
            )
        return self.costs, self.table


def report_differences(name: str, found: list[str], transfer: bool) -> None:
    """Nothing for no difference; else PolicyError, or a warning when transfer was asked for."""
    if not found:
        return
    message = f"policy {name!r} was made for something else: {'; '.join(found)}"
    if not transfer:
        raise PolicyError(f"{message}. Use a policy made for this, or load it with transfer=True")
    warnings.warn(f"{message}. It is used all the same, as transfer=True asks", stacklevel=3)
