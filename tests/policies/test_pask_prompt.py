"""The frozen prompt plan against a step-by-step search, and its accounting."""

import dataclasses
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pask_twin import plan as plan_slowly

from jaxkv.errors import RequestError
from jaxkv.policies import load_policy
from jaxkv.policies.pask.policy import Pask
from jaxkv.policies.pask.prompt import plan_prompt, resolve_labels
from jaxkv.policies.pask.table import Entry
from jaxkv.state.actions import HIGH, LOW, RELEASE
from jaxkv.state.payload import KVSpec, group_costs, scheduled_payload

SMOLLM = group_costs(KVSpec(30, 3, 64))
scores = st.sampled_from([0.0, 1.0, 2.0, 3.0])
entry = st.builds(Entry, st.integers(0, 2), st.integers(0, 2), st.tuples(scores, scores))
entries = st.lists(st.tuples(entry, entry, entry), min_size=1, max_size=3).map(tuple)


@settings(max_examples=150, deadline=None)
@given(
    table=entries,
    labels=st.lists(st.integers(0, 2), max_size=9),
    budget=st.fractions(0, 1, max_denominator=60),
    window=st.integers(0, 3),
    sinks=st.integers(0, 3),
    spec=st.sampled_from([KVSpec(30, 3, 64), KVSpec(32, 8, 128), KVSpec(7, 1, 5), KVSpec(2, 1, 3)]),
)
def test_plan_equals_a_greedy_search(table, labels, budget, window, sinks, spec):
    costs = group_costs(spec)
    labels = np.array([label % len(table) for label in labels], np.int64)
    plan = plan_prompt(table, labels, costs, budget, window, sinks)
    expected = plan_slowly(table, labels, costs, budget, window, sinks)
    assert plan.actions.tolist() == expected
    assert plan.actions.dtype == np.int8
    assert plan.payload == scheduled_payload(costs, plan.actions)
    assert plan.target == budget * len(labels) * costs.full
    # above the target only where floors and protection are, and then without any upgrade
    assert max(0, plan.payload - plan.target) == plan.floor_excess
    assert all(plan.actions[t, c] >= table[labels[t]][c].floor for t in range(len(labels)) for c in range(3))


def test_protected_positions_are_high_and_counted_in_the_target():
    table = ((Entry(RELEASE, RELEASE, (1.0, 1.0)),) * 3,)
    plan = plan_prompt(table, np.zeros(30, np.int64), SMOLLM, Fraction(1, 10), 2, 1)
    assert plan.actions[[0, -1, -2]].tolist() == [[HIGH] * 3] * 3
    assert plan.actions[1:-2].tolist() == [[RELEASE] * 3] * 27
    assert (plan.floor_excess, plan.payload) == (0, 3 * SMOLLM.full)
    excess = plan_prompt(table, np.zeros(20, np.int64), SMOLLM, Fraction(1, 10), 2, 1)
    assert excess.floor_excess == SMOLLM.full


def test_ties_go_by_token_then_group():
    table = ((Entry(LOW, LOW, (1.0, 1.0)),) * 3,)
    units = 10 * 51 + 4 * 47  # ten tokens low, four upgrades
    plan = plan_prompt(table, np.zeros(10, np.int64), SMOLLM, Fraction(units, 10 * 192), 0, 0)
    assert plan.actions[:2].tolist() == [[HIGH, HIGH, HIGH], [HIGH, LOW, LOW]]
    assert (plan.actions[2:] == LOW).all()


@pytest.mark.parametrize("length", [1, 3, 16, 20, 21, 227])
def test_a_prompt_of_any_length_has_a_plan(length):
    bound = load_policy("structural-prior").bind(KVSpec(30, 3, 64), 8192)
    actions = bound.plan_prompt(length)
    assert actions.shape == (length, 3)
    assert (actions[:4] == HIGH).all()
    assert (actions[-16:] == HIGH).all()
    assert (actions >= LOW).all()


def test_a_long_prompt_is_planned_quickly():
    bound = load_policy("structural-prior").bind(KVSpec(30, 3, 64), 8192)
    start = time.perf_counter()
    bound.plan_prompt(8192)
    assert time.perf_counter() - start < 0.5


ROW = {
    "a": (Entry(LOW, RELEASE, (2.0, 1.0)),) * 3,
    "b": (Entry(RELEASE, LOW, (2.0, 5.0)),) * 3,
    "c": (Entry(HIGH, RELEASE, (0.5, 1.0)),) * 3,
}


def test_tokens_that_cross_labels_take_the_safest_and_agree_on_scores():
    """Eq. 12: action and floor are the maximum over bases and floors; an upgrade needs one score."""
    names = ("a", "b", "c", "unseen")
    entries, rows = resolve_labels(ROW, names, [(0,), (0, 1), (0, 1), (0, 2), (3,), (0, 3)], 3)
    assert rows.tolist() == [0, 1, 1, 2, 3, 4]
    assert entries[0] == ROW["a"]
    assert [(entry.base, entry.floor) for entry, *_ in entries[1:]] == [(LOW, LOW)] + [(HIGH, HIGH)] * 3
    crossing = entries[1][0]
    assert crossing.scores[0] == 2.0
    assert np.isnan(crossing.scores[1]), "1 and 5 are not one score"
    assert np.isnan(entries[3][0].scores).all()
    plan = plan_prompt(entries, rows, SMOLLM, Fraction(1), 0, 0)
    assert plan.actions[:, 0].tolist() == [HIGH, LOW, LOW, HIGH, HIGH, HIGH], "no upgrade without a score"


def test_labels_decide_the_plan_of_a_policy_that_has_them():
    frozen = dataclasses.replace(
        load_policy("structural-prior").frozen,
        prompt={
            "protected_content": (Entry(HIGH, HIGH, (1.0, 1.0)),) * 3,
            "schema_scaffold": (Entry(RELEASE, RELEASE, (1.0, 1.0)),) * 3,
        },
        budget_prompt=Fraction(1, 100),
        window=1,
        sinks=1,
    )
    policy = Pask(frozen).bind(KVSpec(30, 3, 64), 8192)
    assert policy.needs.labels
    assert not load_policy("structural-prior").needs.labels
    labels = [(0,), (0,), (1,), (1,), (0, 1), (2,), (1,), (1,)]
    actions = policy.plan_prompt(8, labels)
    assert actions[:, 0].tolist() == [HIGH, HIGH, RELEASE, RELEASE, HIGH, HIGH, RELEASE, HIGH]
    assert (policy.plan_prompt(8) == HIGH).all(), "all text is protected content without labels"
    with pytest.raises(RequestError, match="8 labels for a prompt of 9 tokens"):
        policy.plan_prompt(9, labels)
