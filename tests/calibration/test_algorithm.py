"""Algorithm 1 against a plain reference written apart from it, and the propositions of Appendix E."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from calibration import algorithm
from calibration.algorithm import Outcome, Reference, Upgrade
from jaxkv.errors import PolicyError
from jaxkv.state.payload import Costs, KVSpec, group_costs

COSTS = group_costs(KVSpec(num_layers=4, num_kv_heads=2, head_dim=6))
R, L, H = 0, 1, 2


def random_table(rng, keys=5, groups=3, requests=40):
    failures = rng.integers(-3, 6, (keys, groups, 2))
    distortion = rng.choice([0.0, 0.25, 1.0, 3.0], (keys, groups, 2)) * rng.choice(
        [1.0, rng.random()], (keys, groups, 2)
    )
    counts = rng.integers(0, 30, keys)
    return failures, distortion, counts, requests


def random_reference(rng, keys=5, states=3, requests=6):
    candidates = [(k,) for k in range(keys)] + [(0, 2), (1, 3, 4), ()]
    lengths = rng.integers(1, 25, requests)
    return Reference(
        candidates=tuple(candidates),
        kinds=tuple(rng.integers(0, len(candidates), n) for n in lengths),
        states=tuple(rng.integers(0, states, n) for n in lengths),
        state_names=tuple(f"state-{i}" for i in range(states)),
    )


def plain_floor(v_r, v_l, n, tau_low, tau_high):
    """Eqs. 5 and 6, one bucket, in exact fractions."""
    low = max(Fraction(0), Fraction(int(v_l), n))
    released = max(low, Fraction(int(v_r), n))
    if low > tau_high:
        return H
    return R if released <= tau_low else L


def plain_score(d_from, d_to, count, requests, bits):
    saved = max(d_from - d_to, 0.0)
    return saved / ((count / requests) * bits) if count else 0.0


def plain_path(floor, scores):
    """Look at every bucket before every step."""
    actions, path = floor.copy(), []
    while True:
        best = None
        for q in range(floor.shape[0]):
            for c in range(floor.shape[1]):
                level = int(actions[q, c])
                if level < H and (best is None or scores[q, c, level] > best[0]):
                    best = (scores[q, c, level], Upgrade(q, c, level))
        if best is None:
            return tuple(path)
        path.append(best[1])
        actions[best[1].key, best[1].group] += 1


def plain_token(actions, keys):
    return [max((int(actions[k, c]) for k in keys), default=H) for c in range(actions.shape[1])]


def plain_cost(row):
    return sum((0, COSTS.low[c], COSTS.high[c])[a] for c, a in enumerate(row))


def plain_samples(actions, floor, reference, budget, horizon):
    samples = {}
    for kinds, states in zip(reference.kinds, reference.states, strict=True):
        prices = []
        for kind in kinds:
            keys = reference.candidates[kind]
            row = plain_token(floor, keys)
            if len(keys) > 1:
                row = [max(a, b) for a, b in zip(row, plain_token(actions, keys), strict=True)]
            prices.append(plain_cost(row))
        for u in range(len(kinds)):
            ahead = [
                sum(prices[u + 1 : u + 1 + h]) - h * budget * COSTS.full
                for h in range(min(horizon, len(kinds) - u - 1) + 1)
            ]
            samples.setdefault(reference.state_names[states[u]], []).append(max(0, *ahead))
    return samples


@pytest.mark.parametrize("seed", range(200))
def test_equals_the_plain_reference(seed):
    rng = np.random.default_rng(seed)
    failures, distortion, counts, requests = random_table(rng)
    thresholds = algorithm.THRESHOLDS[rng.integers(len(algorithm.THRESHOLDS))]
    floor = algorithm.floors(algorithm.envelope(failures), requests, thresholds)
    scores = algorithm.priorities(distortion, counts, requests, COSTS)
    for q, c in np.ndindex(floor.shape):
        assert floor[q, c] == plain_floor(*failures[q, c], requests, *thresholds)
        wanted = (
            plain_score(distortion[q, c, 0], distortion[q, c, 1], counts[q], requests, COSTS.low[c]),
            plain_score(distortion[q, c, 1], 0.0, counts[q], requests, COSTS.high[c] - COSTS.low[c]),
        )
        assert tuple(scores[q, c]) == wanted
    path = algorithm.greedy_path(floor, scores)
    assert path == plain_path(floor, scores)

    reference = random_reference(rng)
    nested = list(algorithm.maps(floor, path))
    ratios = [algorithm.reference_ratio(actions, reference, COSTS) for actions in nested]
    for before, after in itertools.pairwise(nested):
        assert (before <= after).all()
        assert (before != after).sum() == 1
    assert ratios == sorted(ratios), "Proposition 2: nominal cost never falls along a path"
    assert (nested[-1] == H).all()
    assert ratios[-1] == 1
    at = rng.integers(len(nested))
    every = [kind for kinds in reference.kinds for kind in kinds]
    paid = sum(plain_cost(plain_token(nested[at], reference.candidates[kind])) for kind in every)
    assert ratios[at] == Fraction(paid, len(every) * COSTS.full)

    horizon, beta = int(rng.integers(1, 10)), Fraction(int(rng.integers(1, 11)), 10)
    found = algorithm.reserve(nested[at], floor, reference, COSTS, ratios[at], horizon, beta)
    samples = plain_samples(nested[at], floor, reference, ratios[at], horizon)
    value = lambda pair: pair[0] * COSTS.full - pair[1] * ratios[at] * COSTS.full  # noqa: E731
    assert found.states.keys() == samples.keys()
    for state, values in samples.items():
        covered = value(found.states[state])
        assert covered == sorted(values)[math.ceil(beta * len(values)) - 1]
        assert sum(v <= covered for v in values) >= beta * len(values), "Proposition on coverage (E.4)"
    pooled = sorted(v for values in samples.values() for v in values)
    assert value(found.pooled) == pooled[math.ceil(beta * len(pooled)) - 1]

    outcomes = [
        Outcome(int(f), Fraction(int(n), 20))
        for f, n in zip(rng.integers(0, 12, 8), rng.integers(1, 20, 8), strict=True)
    ]
    control, alpha = Outcome(4, Fraction(1)), algorithm.TOLERANCES[rng.integers(7)]
    allowed = [i for i, o in enumerate(outcomes) if Fraction(o.failures - 4, requests) <= alpha]
    chosen = algorithm.select(outcomes, control, requests, alpha)
    if not allowed:
        assert chosen is None
    else:
        assert chosen in allowed
        assert all(
            (outcomes[chosen].ratio, outcomes[chosen].failures, chosen) <= (outcomes[i].ratio, outcomes[i].failures, i)
            for i in allowed
        )
    within = algorithm.select_within(outcomes, Fraction(1, 4))
    cheap = [i for i, o in enumerate(outcomes) if o.ratio <= Fraction(1, 4)]
    assert (within is None) == (not cheap)
    if cheap:
        assert outcomes[within].failures == min(outcomes[i].failures for i in cheap)


def test_one_failure_in_two_hundred_is_within_half_a_percent():
    failures = np.array([[[1, 0]], [[2, 1]], [[3, 2]], [[9, 3]]])
    floor = algorithm.floors(algorithm.envelope(failures), 200, algorithm.DEFAULT_THRESHOLDS)
    assert floor[:, 0].tolist() == [R, L, L, H]


def test_a_low_action_that_fails_more_raises_the_release():
    assert algorithm.envelope(np.array([[[1, 4], [-2, -1]]])).tolist() == [[[4, 4, 0], [0, 0, 0]]]


def test_thresholds_are_the_28_pairs_and_have_an_order():
    assert len(set(algorithm.THRESHOLDS)) == 28
    assert algorithm.DEFAULT_THRESHOLDS in algorithm.THRESHOLDS
    assert [float(t) for t in algorithm.TOLERANCES] == [0, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05]
    with pytest.raises(PolicyError, match=r"thresholds \(1/100, 0\) are not"):
        algorithm.floors(np.zeros((1, 1, 3), int), 10, (Fraction(1, 100), Fraction(0)))


def test_equal_scores_go_by_key_group_and_level():
    floor = np.zeros((2, 2), np.int8)
    path = algorithm.greedy_path(floor, np.zeros((2, 2, 2)))
    assert path == tuple(Upgrade(q, c, level) for q in (0, 1) for c in (0, 1) for level in (R, L))


def test_all_high_needs_no_reserve_and_nothing_within_tolerance_selects_the_control():
    rng = np.random.default_rng(0)
    reference, high = random_reference(rng), np.full((5, 3), H, np.int8)
    found = algorithm.reserve(high, high, reference, COSTS, Fraction(1))
    assert {pair[1] for pair in (*found.states.values(), found.pooled)} == {0}
    assert algorithm.select([Outcome(30, Fraction(1, 10))], Outcome(4, Fraction(1)), 40, Fraction(1, 20)) is None


def test_counts_are_of_tokens_by_candidate():
    reference = Reference(((0,), (0, 1), ()), (np.array([0, 1, 1, 2]),), (np.zeros(4, int),), ("s",))
    assert reference.counts(2).tolist() == [3, 2]
    assert reference.kind_counts().tolist() == [1, 2, 1]
    empty = Reference(((0,),), (np.zeros(0, int),), (np.zeros(0, int),), ("s",))
    with pytest.raises(PolicyError, match="no token"):
        algorithm.reference_ratio(np.zeros((1, 3), np.int8), empty, COSTS)


def test_costs_of_another_model_give_the_same_reserve_in_its_units():
    rng = np.random.default_rng(3)
    reference, floor = random_reference(rng), rng.integers(0, 3, (5, 3)).astype(np.int8)
    twice = Costs(low=tuple(2 * x for x in COSTS.low), high=tuple(2 * x for x in COSTS.high))
    ours, theirs = (algorithm.reserve(floor, floor, reference, costs, Fraction(2, 5)) for costs in (COSTS, twice))
    assert ours == theirs
