"""One conformance matrix over every policy that `load_policy` knows."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.errors import PolicyError, RequestError
from jaxkv.grammar.tags import CALL_VOCABULARY, SQL_VOCABULARY, UNRESOLVED
from jaxkv.policies import Policy, load_policy, policy_names
from jaxkv.state.actions import HIGH, RELEASE
from jaxkv.state.payload import KVSpec, group_costs, request_cost

SPEC = KVSpec(30, 3, 64)
every_policy = pytest.mark.parametrize("name", policy_names())


def bound(name):
    return load_policy(name).bind(SPEC, 2048, "any fingerprint")


def transition(*tags, parser_state="string"):
    return SimpleNamespace(tags=tags, parser_state=parser_state, terminated=False)


def test_names():
    assert policy_names() == ("full", "all_high", "all_high_sql", "structural-prior")


@every_policy
def test_policies_follow_the_protocol(name):
    policy = bound(name)
    assert isinstance(policy, Policy)
    assert policy.name == name
    assert policy.calibrated is (name != "structural-prior")
    assert (policy.window, policy.sinks, policy.groups) == (16, 4, ("lower", "middle", "upper"))
    assert policy.needs.tags is (name != "full")
    assert policy.vocabulary == {"full": None, "all_high_sql": SQL_VOCABULARY}.get(name, CALL_VOCABULARY)


@every_policy
def test_step_keeps_shapes_rows_and_inactive_rows(name):
    policy = bound(name)
    state = policy.init(4)
    assert all(leaf.shape[0] == 4 for leaf in jax.tree.leaves(state))
    ids, parser_state = policy.encode(transition(3))
    tags = jnp.array(np.stack([ids] * 4))
    active = jnp.array([True, False, True, True])
    actions, after = policy.step(state, tags, jnp.full(4, parser_state, jnp.int32), active)
    assert (actions.shape, actions.dtype) == ((4, 3), jnp.int8)
    assert (np.asarray(actions) <= HIGH).all()
    assert (np.asarray(actions) >= RELEASE).all()
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        assert (old.shape, old.dtype) == (new.shape, new.dtype)
        assert old[1] == new[1]
    again = jax.jit(policy.step)(state, tags, jnp.full(4, parser_state, jnp.int32), active)[0]
    assert (again == actions).all()
    reset = policy.reset_row(after, 0)
    for fresh, new in zip(jax.tree.leaves(state), jax.tree.leaves(reset), strict=True):
        assert fresh[0] == new[0]


@every_policy
@pytest.mark.parametrize("length", [0, 1, 17, 300])
def test_prompt_plans_protect_sinks_and_the_newest_tokens(name, length):
    policy = bound(name)
    actions = policy.plan_prompt(length, ((0,), (1, 2), (6,)) * 100 if length == 300 else None)
    assert (actions.shape, actions.dtype) == ((length, 3), np.int8)
    assert (actions[: policy.sinks] == HIGH).all()
    assert (actions[max(length - policy.window, 0) :] == HIGH).all()


@every_policy
def test_stop_tokens_carry_no_tag(name):
    policy = bound(name)
    ids, _ = policy.encode(transition())
    assert (ids.shape, ids.dtype) == ((policy.max_tags,), np.int32)
    assert (ids == -1).all()


def test_high_policies_cost_exactly_full_kv():
    costs = group_costs(SPEC)
    decode = np.full((40, 3), HIGH, np.int8)
    for name in ("full", "all_high"):
        cost = request_cost(costs, bound(name).plan_prompt(200), decode, 16, 4)
        assert (cost.ratio_total, cost.ratio_live) == (1.0, 1.0)


def test_the_prior_costs_about_half():
    """On answers like BFCL's: a long prompt, then names, keys, values and separators in turn."""
    policy = bound("structural-prior")
    rng = np.random.default_rng(7)
    state, decode = policy.init(1), []
    for _ in range(47):
        tags = jnp.array(policy.encode(transition(int(rng.integers(0, 48))))[0])[None]
        actions, state = policy.step(state, tags, jnp.zeros(1, jnp.int32), jnp.ones(1, bool))
        decode.append(np.asarray(actions[0]))
    cost = request_cost(policy.costs, policy.plan_prompt(227), np.stack(decode), policy.window, policy.sinks)
    assert 0.45 < cost.ratio_total < 0.55
    assert cost.ratio_decode <= 0.5 + 1 / 47


def test_encode_keeps_candidates_and_looks_up_the_parser_state():
    policy = bound("structural-prior")
    ids, state = policy.encode(transition(5, UNRESOLVED, 5, 9))
    assert ids[:4].tolist() == [5, UNRESOLVED, 9, -1]
    assert state == len(policy.frozen.reserve.states)  # no reserve of its own: the pooled one, which is last


def test_encode_makes_too_many_candidates_high():
    policy = bound("structural-prior")
    ids, _ = policy.encode(transition(*range(policy.max_tags)))
    assert ids.tolist() == list(range(policy.max_tags))
    ids, _ = policy.encode(transition(*range(policy.max_tags + 1)))
    assert ids.tolist() == [UNRESOLVED] + [-1] * (policy.max_tags - 1)


@pytest.mark.parametrize("tag", [48, -1, -3])
def test_encode_refuses_tags_of_another_vocabulary(tag):
    with pytest.raises(RequestError, match=f"tag id {tag} is outside the 48 tags"):
        bound("structural-prior").encode(transition(0, tag))


def test_an_unbound_policy_says_so():
    with pytest.raises(PolicyError, match=r"'all_high' is not bound to a model; call policy\.bind"):
        load_policy("all_high").init(1)


def test_a_spec_with_other_groups_is_refused():
    with pytest.raises(PolicyError, match="layer groups"):
        load_policy("all_high").bind(KVSpec(4, 1, 8, ((0, 2), (2, 4))), 64)


def test_full_kv_takes_any_number_of_groups():
    policy = load_policy("full").bind(KVSpec(4, 1, 8, ((0, 2), (2, 4))), 64)
    assert policy.groups == ("0", "1")
    assert policy.plan_prompt(5).shape == (5, 2)


@pytest.mark.parametrize("name", ["half", "structural_prior", ""])
def test_unknown_names_list_the_known_ones(name):
    with pytest.raises(
        PolicyError,
        match=f"unknown policy {name!r}; known are full, all_high, all_high_sql, structural-prior, or the path",
    ):
        load_policy(name)
