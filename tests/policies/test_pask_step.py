"""Algorithm 2, batched and jitted, against its plain twin and against cases worked out by hand."""

import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pask_twin import Twin

from jaxkv.grammar.tags import CALL_VOCABULARY
from jaxkv.policies import load_policy
from jaxkv.policies.pask.frozen_policy import FrozenPolicy, Reserve, tag_names
from jaxkv.policies.pask.ledger import Ledger
from jaxkv.policies.pask.policy import Pask
from jaxkv.policies.pask.step import step
from jaxkv.policies.pask.table import Entry
from jaxkv.state.actions import HIGH, LOW, RELEASE
from jaxkv.state.payload import KVSpec, group_costs

TAGS = tag_names(CALL_VOCABULARY)
SMOLLM = KVSpec(30, 3, 64)  # one token costs (17, 64) units low and high in each group, 192 in full
STATES = ("key", "string", "number")
CRITICAL = "schema_bearing/required/critical/no_lookahead"
AHEAD = "pure_scaffold/scaffold_separator/boundary/lookahead_critical"
PLAIN = "pure_scaffold/scaffold_separator/boundary/no_lookahead"
jitted = jax.jit(step)


def policy(decode, budget="1", states=None, pooled=(Fraction(0), 0), spec=SMOLLM, context=4096) -> Pask:
    any_row = (Entry(HIGH, HIGH, (0.0, 0.0)),) * 3
    frozen = FrozenPolicy(
        name="test",
        calibrated=False,
        note="",
        decode=decode,
        prompt={"protected_content": any_row},
        budget_decode=Fraction(budget),
        budget_prompt=Fraction(1),
        xgrammar="0.2.9",
        reserve=Reserve(states=states or {}, pooled=pooled),
    )
    return Pask(frozen).bind(spec, context)


def ids(*rows, width=4):
    """Tag-id matrix from rows of tag names; None is an unresolved tag."""
    numbers = [[-2 if tag is None else TAGS.index(tag) for tag in row] for row in rows]
    return jnp.array([row + [-1] * (width - len(row)) for row in numbers], jnp.int32)


def one(bound: Pask, *tags, ledger=None, parser_state=0):
    """Actions and ledger of one token in one row."""
    ledger = bound.init(1) if ledger is None else ledger
    actions, ledger = jitted(bound.table, ledger, ids(tags), jnp.array([parser_state]), jnp.array([True]))
    return actions[0].tolist(), ledger


def row(*entries):
    return tuple(Entry(*entry) for entry in entries)


# --- against the twin -------------------------------------------------------------------------------------------------

scores = st.sampled_from([0.0, 0.5, 1.0, 2.0])  # few values: ties are the rule
actions = st.integers(RELEASE, HIGH)
entry = st.builds(Entry, actions, actions, st.tuples(scores, scores))
reserve = st.integers(0, 8).flatmap(
    lambda h: st.tuples(st.integers(0, 24).map(lambda f: min(Fraction(f, 7), Fraction(h))), st.just(h))
)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_batched_controller_equals_its_plain_twin(data):
    near = st.sampled_from(TAGS[:10])  # a few tags under common prefixes, so that fallback and own rows both occur
    decode = data.draw(st.dictionaries(near, st.tuples(entry, entry, entry), max_size=6))
    budget = data.draw(st.fractions(0, 1, max_denominator=50))
    states = {name: data.draw(reserve) for name in STATES}
    spec = KVSpec(*data.draw(st.sampled_from([(30, 3, 64), (32, 8, 128), (7, 1, 5), (2, 1, 3)])))
    bound = policy(decode, budget, states, data.draw(reserve), spec)
    candidate = st.one_of(st.sampled_from(TAGS[:12]), st.sampled_from(TAGS), st.none())
    token = st.lists(candidate, max_size=4, unique=True)

    rows, ledger = 3, bound.init(3)
    twins = [Twin(bound.frozen, bound.costs) for _ in range(rows)]
    for _ in range(6):
        tags = [data.draw(token) for _ in range(rows)]
        state = data.draw(st.lists(st.integers(0, len(STATES)), min_size=rows, max_size=rows))
        active = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
        got, ledger = jitted(bound.table, ledger, ids(*tags), jnp.array(state), jnp.array(active))
        for b, twin in enumerate(twins):
            name = (*STATES, "a state without a reserve")[state[b]]
            expected = twin.step(tags[b], name) if active[b] else [RELEASE] * 3
            assert got[b].tolist() == expected
            exact = ledger.balance[b].item() + Fraction(ledger.fraction[b].item(), bound.table.denominator.item())
            assert exact * bound.costs.unit == twin.balance


def test_a_long_random_run_equals_the_twin_and_passes_through_every_branch():
    rng = np.random.default_rng(0)
    rows = {
        str(tag): tuple(
            Entry(*rng.integers(0, [3, 2]).tolist(), tuple(rng.integers(0, 4, 2).astype(float).tolist())) for _ in "LMU"
        )
        for tag in rng.choice(TAGS, 20, replace=False)
    }
    states = {"key": (Fraction(3, 2), 2), "string": (Fraction(1, 3), 1), "number": (Fraction(5), 8)}
    bound = policy(rows, "311/997", states, (Fraction(1), 1))
    known = list(rows)
    tags = [
        rng.choice(known if rng.random() < 0.9 else TAGS, rng.choice([0, 1, 1, 1, 1, 2]), replace=False).tolist()
        for _ in range(2000)
    ]
    state = rng.integers(0, 4, 2000)

    def body(ledger, token):
        action, ledger = step(bound.table, ledger, token[0][None], token[1][None], jnp.array([True]))
        return ledger, (action[0], ledger)

    _, (got, ledgers) = jax.jit(lambda t: jax.lax.scan(body, bound.init(1), t))((ids(*tags), jnp.array(state)))
    twin, expected = Twin(bound.frozen, bound.costs), []
    for token, index in zip(tags, state, strict=True):
        expected.append(twin.step(token, (*STATES, "other")[index]))
    np.testing.assert_array_equal(got, expected)
    balance = np.asarray(ledgers.balance)
    assert balance.min() < 0 < balance.max()
    assert len({tuple(action) for action in expected}) > 20


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_base_below_floor_starts_at_the_floor():
    bound = policy({PLAIN: row((RELEASE, LOW, (1.0, 1.0)), (LOW, HIGH, (1.0, 1.0)), (HIGH, RELEASE, (1.0, 1.0)))})
    assert one(bound, PLAIN)[0] == [LOW, HIGH, HIGH]


def test_demotion_takes_the_smallest_score_and_stops_as_soon_as_it_fits():
    # 3 HIGH = 192 units; b = 150: the middle group's H -> L (47 units) is undone first, and 145 fits.
    decode = {PLAIN: row((HIGH, RELEASE, (9.0, 3.0)), (HIGH, RELEASE, (9.0, 1.0)), (HIGH, RELEASE, (9.0, 2.0)))}
    assert one(policy(decode, "150/192"), PLAIN)[0] == [HIGH, LOW, HIGH]
    assert one(policy(decode, "145/192"), PLAIN)[0] == [HIGH, LOW, HIGH]
    assert one(policy(decode, "144/192"), PLAIN)[0] == [HIGH, LOW, LOW]


def test_release_waits_for_its_own_group_to_be_low():
    # The smallest score of all is the lower group's R -> L, but its H -> L has the largest: the others go first.
    decode = {PLAIN: row((HIGH, RELEASE, (0.0, 9.0)), (HIGH, RELEASE, (8.0, 2.0)), (HIGH, RELEASE, (8.0, 3.0)))}
    assert one(policy(decode, "98/192"), PLAIN)[0] == [HIGH, LOW, LOW]
    # 97 units: the next smallest are the R -> L of middle and upper (8), middle first.
    assert one(policy(decode, "97/192"), PLAIN)[0] == [HIGH, RELEASE, LOW]


def test_ties_are_broken_by_group():
    tie = row(*[(HIGH, RELEASE, (1.0, 1.0))] * 3)
    assert one(policy({PLAIN: tie}, "145/192"), PLAIN)[0] == [LOW, HIGH, HIGH]
    # the lower group's L -> R ties with the middle group's H -> L
    assert one(policy({PLAIN: tie}, "144/192"), PLAIN)[0] == [RELEASE, HIGH, HIGH]
    up = row(*[(RELEASE, RELEASE, (1.0, 1.0))] * 3)
    assert one(policy({CRITICAL: up}, "64/192"), CRITICAL)[0] == [HIGH, RELEASE, RELEASE]


def test_floors_come_before_the_budget_and_the_debt_carries_forward():
    decode = {PLAIN: row(*[(HIGH, LOW, (1.0, 1.0))] * 3), CRITICAL: row(*[(LOW, RELEASE, (1.0, 1.0))] * 3)}
    bound = policy(decode, "1/192")
    action, ledger = one(bound, PLAIN)
    assert action == [LOW, LOW, LOW]
    assert ledger.balance.tolist() == [1 - 51 + 1]
    action, ledger = one(bound, CRITICAL, ledger=ledger)
    assert action == [RELEASE, RELEASE, RELEASE]
    assert ledger.balance.tolist() == [-49 + 1]


def test_only_critical_and_lookahead_critical_tags_are_promoted():
    low = row(*[(LOW, LOW, (1.0, 1.0))] * 3)
    bound = policy(dict.fromkeys((CRITICAL, AHEAD, PLAIN), low))
    assert one(bound, CRITICAL)[0] == [HIGH] * 3
    assert one(bound, AHEAD)[0] == [HIGH] * 3
    assert one(bound, PLAIN)[0] == [LOW] * 3


def test_promotion_stops_at_the_first_that_does_not_fit():
    # L R L costs 34. The best upgrade, H in the lower group, costs 47 more and does not fit 60 units; the middle
    # group's R -> L, at 17 more, would, but comes after it.
    decode = {CRITICAL: row((LOW, LOW, (1.0, 9.0)), (RELEASE, RELEASE, (3.0, 1.0)), (LOW, LOW, (1.0, 1.0)))}
    assert one(policy(decode, "60/192"), CRITICAL)[0] == [LOW, RELEASE, LOW]
    assert one(policy(decode, "98/192"), CRITICAL)[0] == [HIGH, LOW, LOW]
    assert one(policy(decode, "97/192"), CRITICAL)[0] == [HIGH, RELEASE, LOW]


def test_zero_scores_stay_eligible():
    bound = policy({CRITICAL: row(*[(RELEASE, RELEASE, (0.0, 0.0))] * 3)})
    assert one(bound, CRITICAL)[0] == [HIGH] * 3


def test_reserve_is_held_back_by_parser_state_and_is_exact():
    decode = {CRITICAL: row(*[(LOW, RELEASE, (1.0, 1.0))] * 3)}
    # B_D = 1/2: R_1 = 96. Gamma(key) = 45 - 0 leaves 51 = L L L exactly; Gamma(string) = 46 does not.
    states = {"key": (Fraction(45, 192), 0), "string": (Fraction(46, 192), 0), "number": (Fraction(2), 8)}
    bound = policy(decode, "1/2", states, pooled=(Fraction(96, 192), 1))
    assert one(bound, CRITICAL, parser_state=0)[0] == [LOW, LOW, LOW]
    assert one(bound, CRITICAL, parser_state=1)[0] == [RELEASE, LOW, LOW]
    # [2 * 192 - 8 * 96]+ = 0 and the pooled [96 - 96]+ = 0 leave 96 units; one H and two L would cost 98.
    assert one(bound, CRITICAL, parser_state=2)[0] == one(bound, CRITICAL, parser_state=3)[0] == [LOW, LOW, LOW]


def test_a_fraction_of_a_unit_decides_nothing_until_it_adds_up():
    # b = 16 2/3 units: L (17) does not fit the first token, fits the second (33 1/3), and R carries 1/3 on.
    decode = {PLAIN: row((LOW, RELEASE, (1.0, 1.0)), (RELEASE, RELEASE, (1.0, 1.0)), (RELEASE, RELEASE, (1.0, 1.0)))}
    bound = policy(decode, Fraction(50, 3) / 192)
    first, ledger = one(bound, PLAIN)
    second, ledger = one(bound, PLAIN, ledger=ledger)
    assert (first, second) == ([RELEASE] * 3, [LOW, RELEASE, RELEASE])
    assert (ledger.balance.item(), ledger.fraction.item(), bound.table.denominator.item()) == (33, 0, 3)


def test_candidate_tags_take_the_maximum_as_action_and_floor():
    decode = {
        PLAIN: row((RELEASE, RELEASE, (1.0, 1.0)), (LOW, RELEASE, (1.0, 1.0)), (HIGH, RELEASE, (1.0, 1.0))),
        AHEAD: row((RELEASE, LOW, (2.0, 2.0)), (RELEASE, RELEASE, (2.0, 2.0)), (RELEASE, RELEASE, (2.0, 2.0))),
    }
    bound = policy(decode, "0")
    assert one(bound, PLAIN)[0] == [RELEASE, RELEASE, RELEASE]  # alone, demoted to its floors
    assert one(bound, PLAIN, AHEAD)[0] == [LOW, LOW, HIGH]  # together, nothing can be undone
    assert one(bound, AHEAD, PLAIN)[0] == [LOW, LOW, HIGH]


def test_candidate_tags_are_promoted_only_where_their_score_is_unique():
    decode = {
        PLAIN: row((LOW, LOW, (1.0, 1.0)), (LOW, LOW, (1.0, 5.0)), (RELEASE, RELEASE, (4.0, 3.0))),
        AHEAD: row((LOW, LOW, (1.0, 2.0)), (LOW, LOW, (2.0, 5.0)), (RELEASE, RELEASE, (1.0, 3.0))),
    }
    bound = policy(decode)
    # lower: 1 and 2 differ. middle: 5 and 5 agree. upper: its R -> L differs, so its L -> H is never reached.
    assert one(bound, PLAIN, AHEAD)[0] == [LOW, HIGH, RELEASE]


def test_missing_tags_fall_back_through_their_prefixes():
    decode = {
        "schema_bearing/required/critical/no_lookahead": row(*[(LOW, RELEASE, (1.0, 1.0))] * 3),
        "schema_bearing/required/boundary/no_lookahead": row(*[(RELEASE, HIGH, (1.0, 2.0))] * 3),
        "schema_bearing/optional/boundary/no_lookahead": row(*[(RELEASE, RELEASE, (1.0, 1.0))] * 3),
    }
    tight = policy(decode, "0")
    assert one(tight, "schema_bearing/required/critical/lookahead_critical")[0] == [LOW] * 3  # (class, role, state)
    assert one(tight, "schema_bearing/optional/critical/no_lookahead")[0] == [RELEASE] * 3  # (class, role)
    assert one(tight, "schema_bearing/dispatch_key/critical/no_lookahead")[0] == [HIGH] * 3  # class
    assert one(tight, "free_generation/required/critical/no_lookahead")[0] == [HIGH] * 3  # nothing: high
    assert one(tight, None)[0] == [HIGH] * 3
    # One descendant: its score is unique and the token, critical itself, may be promoted. Three that differ: not.
    wide = policy({**decode, "schema_bearing/required/boundary/no_lookahead": decode[CRITICAL]})
    assert one(wide, "schema_bearing/required/critical/lookahead_critical")[0] == [HIGH] * 3
    other = row(*[(LOW, RELEASE, (1.0, 1.5))] * 3)
    mixed = policy({CRITICAL: decode[CRITICAL], "schema_bearing/required/critical/lookahead_critical": other})
    assert one(mixed, "schema_bearing/optional/critical/no_lookahead")[0] == [LOW] * 3


def test_floors_hold_whatever_happens():
    rng = np.random.default_rng(1)
    decode = {
        tag: tuple(Entry(*rng.integers(0, 3, 2).tolist(), tuple(rng.random(2).tolist())) for _ in range(3))
        for tag in TAGS
    }
    bound = policy(decode, "1/5")
    tags = rng.integers(0, 48, (400, 3))
    floors = np.asarray(bound.table.floor)
    ledger = bound.init(3)
    for token in tags:
        padded = np.full((3, 4), -1, np.int32)
        padded[:, 0] = token
        action, ledger = jitted(bound.table, ledger, padded, np.zeros(3, np.int32), np.ones(3, bool))
        assert (np.asarray(action) >= floors[token]).all()
    assert np.asarray(ledger.balance).max() < 0  # floors alone cost more than a fifth


# --- rows, batches, traces --------------------------------------------------------------------------------------------


def test_inactive_rows_and_stop_tokens_are_not_charged():
    bound = policy({CRITICAL: row(*[(HIGH, LOW, (1.0, 1.0))] * 3)}, "2/7")
    ledger = Ledger(jnp.array([5, -3, 11], jnp.int32), jnp.array([1, 2, 3], jnp.int32))
    tags = ids([CRITICAL], [CRITICAL], [])
    action, after = jitted(bound.table, ledger, tags, jnp.zeros(3, int), jnp.array([True, False, True]))
    assert action.tolist() == [[LOW] * 3, [RELEASE] * 3, [RELEASE] * 3]
    assert after.balance.tolist()[1:] == [-3, 11]
    assert after.fraction.tolist()[1:] == [2, 3]
    # b = 2/7 * 192 = 54 6/7, and 1/7 + 6/7 carries
    assert (after.balance.tolist()[0], after.fraction.tolist()[0]) == (5 - 51 + 54 + 1, 0)


def test_rows_do_not_see_each_other():
    bound = load_policy("structural-prior").bind(SMOLLM, 4096)
    rng = np.random.default_rng(2)
    tags = rng.integers(-2, 48, (20, 3, 4)).astype(np.int32)
    state, active = np.zeros(3, np.int32), np.ones(3, bool)
    ledger, alone = bound.init(3), [bound.init(1) for _ in range(3)]
    for token in tags:
        action, ledger = jitted(bound.table, ledger, token, state, active)
        for b in range(3):
            single, alone[b] = jitted(bound.table, alone[b], token[b : b + 1], state[:1], active[:1])
            assert np.asarray(single)[0].tolist() == np.asarray(action)[b].tolist()
            assert np.asarray(alone[b].balance)[0] == np.asarray(ledger.balance)[b]


def test_restoring_the_ledger_is_a_rollback():
    bound = policy({CRITICAL: row(*[(HIGH, RELEASE, (1.0, 1.0))] * 3)}, "1/3")
    _, saved = one(bound, CRITICAL)
    first, after = one(bound, CRITICAL, ledger=saved)
    again, after_again = one(bound, CRITICAL, ledger=saved)
    assert first == again
    assert [leaf.tolist() for leaf in after] == [leaf.tolist() for leaf in after_again]


def test_reset_row_opens_one_ledger_anew():
    bound = policy({CRITICAL: row(*[(HIGH, HIGH, (1.0, 1.0))] * 3)}, "1/5")
    _, ledger = jitted(bound.table, bound.init(3), ids(*[[CRITICAL]] * 3), jnp.zeros(3, int), jnp.ones(3, bool))
    fresh, reset = bound.init(3), jax.jit(bound.reset_row)(ledger, jnp.array(1))
    assert reset.balance.tolist() == [ledger.balance[0], fresh.balance[1], ledger.balance[2]]
    assert reset.fraction.tolist() == [ledger.fraction[0], fresh.fraction[1], ledger.fraction[2]]


def test_one_compiled_program_serves_every_value_and_every_policy():
    traces = []

    @jax.jit
    def counted(table, ledger, *token):
        traces.append(1)
        return step(table, ledger, *token)

    rng = np.random.default_rng(3)
    for bound in (
        load_policy("all_high").bind(SMOLLM, 64),
        load_policy("structural-prior").bind(KVSpec(36, 8, 128), 9000),
    ):
        ledger = bound.init(2)
        for _ in range(5):
            tags = jnp.array(rng.integers(-2, 48, (2, bound.max_tags)), jnp.int32)
            _, ledger = counted(bound.table, ledger, tags, jnp.zeros(2, jnp.int32), jnp.array(rng.random(2) < 0.5))
    assert len(traces) == 1


def test_work_and_state_do_not_grow_with_history():
    bound = load_policy("structural-prior").bind(SMOLLM, 4096)
    arguments = (ids([CRITICAL]), jnp.zeros(1, int), jnp.ones(1, bool))
    before = bound.init(1)
    after = before
    for _ in range(50):
        _, after = bound.step(after, *arguments)
    first, later = (str(jax.make_jaxpr(step)(bound.table, ledger, *arguments)) for ledger in (before, after))
    assert first == later
    assert not re.search(r"\b(while|scan|sort)\b", first)
    assert [leaf.shape for leaf in jax.tree.leaves(after)] == [(1,), (1,)]


def test_all_high_is_high_always():
    bound = load_policy("all_high").bind(SMOLLM, 4096)
    rng = np.random.default_rng(4)
    ledger = bound.init(3)
    for _ in range(100):
        tags = rng.integers(-2, 48, (3, 4)).astype(np.int32)
        tags[:, 0] = rng.integers(0, 48, 3)
        action, ledger = jitted(bound.table, ledger, tags, np.zeros(3, np.int32), np.ones(3, bool))
        assert (np.asarray(action) == HIGH).all()
    assert ledger.balance.tolist() == [192] * 3


@pytest.mark.parametrize("spec", [KVSpec(2, 1, 8), KVSpec(1, 1, 8)])
def test_models_with_empty_groups_work(spec):
    bound = load_policy("structural-prior").bind(spec, 128)
    action, _ = one(bound, CRITICAL)
    assert group_costs(spec).high[2] == 0
    assert len(action) == 3
