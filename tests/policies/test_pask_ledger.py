"""The int32 ledger is exact: against fractions over 100,000 steps, and at the edges of its range."""

from fractions import Fraction
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.errors import PolicyError
from jaxkv.policies import load_policy
from jaxkv.policies.pask.ledger import open_ledger, settle
from jaxkv.policies.pask.step import payload, step
from jaxkv.policies.pask.table import INT32_MAX, Entry, build_table
from jaxkv.state.actions import HIGH, LOW, RELEASE
from jaxkv.state.payload import KVSpec, group_costs

SMOLLM = group_costs(KVSpec(30, 3, 64))
NO_RESERVE = ((Fraction(0), 0),)
# 8,369 x 262,104-ish units a token: a context of a few thousand tokens fills int32.
WIDE = group_costs(KVSpec(3, 1, 65521))


def random_table(budget: Fraction, context: int):
    rng = np.random.default_rng(5)
    tags = (*(f"class/role/state{i}/next" for i in range(11)), "class/role/critical/next")
    entries = {tag: tuple(Entry(HIGH, RELEASE, tuple(rng.random(2).tolist())) for _ in range(3)) for tag in tags}
    return build_table(entries, tags, SMOLLM, budget, ((Fraction(5, 3), 2), (Fraction(0), 0)), context, "test")


@pytest.mark.parametrize("budget", [Fraction(355, 1130), Fraction(524287, 1048573)])
def test_ledger_equals_fractions_over_100_000_random_steps(budget):
    steps, rows = 100_000, 2
    table = random_table(budget, steps)
    keys = jax.random.split(jax.random.key(6), 3)
    tags = jax.random.randint(keys[0], (steps, rows, 1), 0, 13)
    states = jax.random.randint(keys[1], (steps, rows), 0, 2)
    active = jax.random.bernoulli(keys[2], 0.9, (steps, rows))

    def body(ledger, token):
        action, ledger = step(table, ledger, *token)
        return ledger, (payload(table.costs, action.astype(jnp.int32)), ledger)

    _, (spent, ledgers) = jax.jit(lambda t: jax.lax.scan(body, open_ledger(table, rows), t))((tags, states, active))
    spent, active = np.asarray(spent, np.int64), np.asarray(active)
    balance, fraction = np.asarray(ledgers.balance, np.int64), np.asarray(ledgers.fraction, np.int64)
    b = budget * SMOLLM.full_units
    assert table.denominator == b.denominator
    assert ((fraction >= 0) & (fraction < b.denominator)).all()
    assert balance.min() < 0  # debts occur

    # every row and step: R_{t+1} q = (t + 1) b q - q * sum of charges, in 64-bit integers
    charged = np.cumsum(active, 0) + 1
    exact = charged * b.numerator - np.cumsum(spent, 0) * b.denominator
    np.testing.assert_array_equal(balance * b.denominator + fraction, exact)
    # one row once more as the recurrence of Algorithm 2 in fractions
    moves = [b - int(m) if on else Fraction(0) for m, on in zip(spent[:, 0], active[:, 0], strict=True)]
    recurrence = list(accumulate(moves, initial=b))[1:]
    got = [
        int(whole) + Fraction(int(part), b.denominator)
        for whole, part in zip(balance[:, 0], fraction[:, 0], strict=True)
    ]
    assert got == recurrence


@pytest.mark.parametrize(("budget", "action"), [(Fraction(0), HIGH), (Fraction(1), RELEASE)])
def test_the_widest_allowed_context_stays_exact(budget, action):
    """Nothing but debt, and nothing but credit, for as many tokens as the range check lets through."""
    context = INT32_MAX // WIDE.full_units
    while True:
        try:
            table = build_table({}, ("a/b/c/d",), WIDE, budget, NO_RESERVE, context, "test")
            break
        except PolicyError:
            context -= 1
    assert 1000 < context <= INT32_MAX // WIDE.full_units
    spent = payload(table.costs, jnp.full((1, 3), action))

    def body(ledger, _):
        ledger = settle(table, ledger, spent, jnp.ones(1, bool))
        return ledger, ledger.balance[0]

    _, balance = jax.lax.scan(body, open_ledger(table, 1), None, length=context)
    per_token = int(budget) * WIDE.full_units - int(spent[0])
    start = int(budget) * WIDE.full_units
    np.testing.assert_array_equal(balance, start + per_token * np.arange(1, context + 1, dtype=np.int64))


def test_a_context_beyond_int32_is_refused_with_the_numbers():
    context = INT32_MAX // WIDE.full_units
    with pytest.raises(
        PolicyError, match=rf"units of {WIDE.unit} bits within a context of {context:,}.*2,147,483,647.*shorter"
    ):
        build_table({}, ("a/b/c/d",), WIDE, Fraction(1), NO_RESERVE, context, "test")
    with pytest.raises(PolicyError, match="the ledger may reach"):
        load_policy("structural-prior").bind(KVSpec(3, 1, 65521), 1_000_000)


def test_a_reserve_beyond_int32_is_refused():
    with pytest.raises(PolicyError, match="the ledger may reach"):
        build_table({}, ("a/b/c/d",), SMOLLM, Fraction(0), ((Fraction(2**31), 0),), 64, "test")


def test_a_denominator_beyond_int32_is_refused():
    prime = 2_147_483_647
    with pytest.raises(PolicyError, match="denominator 2,147,483,647"):
        build_table({}, ("a/b/c/d",), SMOLLM, Fraction(5, prime), NO_RESERVE, 64, "test")


def test_low_costs_are_charged_as_low():
    table = random_table(Fraction(1, 2), 64)
    actions = jnp.array([[LOW, HIGH, RELEASE], [LOW, LOW, LOW]])
    assert payload(table.costs, actions).tolist() == [17 + 64, 51]
