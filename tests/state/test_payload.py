"""Payload costs against the paper's definitions and a token-by-token simulation."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.errors import ModelError, RequestError
from jaxkv.state.actions import HIGH, LOW, RELEASE
from jaxkv.state.payload import Cost, Costs, KVSpec, group_costs, layer_groups, request_cost


@pytest.mark.parametrize(
    ("layers", "ranges"),
    [
        (36, ((0, 12), (12, 24), (24, 36))),  # Qwen3-4B: 0-11 / 12-23 / 24-35
        (40, ((0, 14), (14, 27), (27, 40))),  # Qwen3-14B: 0-13 / 14-26 / 27-39
        (32, ((0, 11), (11, 22), (22, 32))),  # LLaMA-3.1-8B: 0-10 / 11-21 / 22-31
        (30, ((0, 10), (10, 20), (20, 30))),
        (2, ((0, 1), (1, 2), (2, 2))),
        (1, ((0, 1), (1, 1), (1, 1))),
    ],
)
def test_layer_groups_are_the_papers(layers, ranges):
    assert layer_groups(layers) == ranges


def test_costs_of_smollm2_by_hand():
    costs = group_costs(KVSpec(num_layers=30, num_kv_heads=3, head_dim=64))
    # n_c = 2 * 10 * 3 * 64 = 3840 elements, k_c = 2 * 10 * 3 = 60 scales
    assert costs.high == (61440,) * 3
    assert costs.low == (4 * 3840 + 16 * 60,) * 3
    assert costs.full == 184320
    assert (costs.unit, costs.low_units, costs.high_units, costs.full_units) == (960, (17,) * 3, (64,) * 3, 192)


def test_groups_of_different_size_cost_by_their_layers():
    costs = group_costs(KVSpec(num_layers=32, num_kv_heads=8, head_dim=128))
    assert costs.high == tuple(16 * 2 * layers * 8 * 128 for layers in (11, 11, 10))
    assert costs.low == tuple(2 * layers * 8 * (4 * 128 + 16) for layers in (11, 11, 10))
    assert tuple(cost * costs.unit for cost in costs.high_units) == costs.high
    assert math.gcd(*costs.low_units, *costs.high_units) == 1


def test_odd_head_width_pays_its_padding():
    # p_c = 2 * 1 * 2 * 1 = 4 rows of 5 elements: 4 * 20 code bits, 16 * 4 scale bits, 4 * 4 padding bits
    assert group_costs(KVSpec(3, 2, 5)).low == (4 * 20 + 16 * 4 + 4 * 4,) * 3
    assert group_costs(KVSpec(3, 2, 6)).low == (4 * 24 + 16 * 4,) * 3


@pytest.mark.parametrize("groups", [((0, 2), (3, 4)), ((0, 2), (1, 4)), ((1, 4),), ((0, 3),), ((0, 5), (5, 4))])
def test_groups_that_do_not_cover_the_layers_are_refused(groups):
    with pytest.raises(ModelError, match="do not cover the 4 layers"):
        KVSpec(4, 1, 8, groups)


@pytest.mark.parametrize("dimensions", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_empty_dimensions_are_refused(dimensions):
    with pytest.raises(ModelError, match="needs at least 1"):
        KVSpec(*dimensions)


def simulate(costs: Costs, prompt, decode, window: int, sinks: int) -> dict[str, int]:
    """The same figures the slow way: hold every position of every step in a list and add it up."""

    def m(group, action):
        return {RELEASE: 0, LOW: costs.low[group], HIGH: costs.high[group]}[int(action)]

    groups = range(len(costs.high))
    held = [list(row) for row in prompt]
    live = live_full = 0
    for actions in decode:
        current = len(held)
        held.append(list(actions))
        for position in range(current + 1):
            newest = [current - back for back in range(1, window + 1)]
            protected = position == current or position in newest or position < sinks
            live += sum(m(c, HIGH if protected else held[position][c]) for c in groups)
            live_full += sum(costs.high)
    return {
        "prefill": sum(m(c, row[c]) for row in prompt for c in groups),
        "prefill_full": len(prompt) * sum(costs.high),
        "decode": sum(m(c, row[c]) for row in decode for c in groups),
        "decode_full": len(decode) * sum(costs.high),
        "live": live,
        "live_full": live_full,
    }


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    prompt=st.integers(0, 12),
    steps=st.integers(0, 12),
    window=st.integers(0, 6),
    sinks=st.integers(0, 5),
    dimensions=st.tuples(st.integers(1, 7), st.integers(1, 3), st.integers(1, 9)),
)
def test_request_cost_equals_a_simulation(data, prompt, steps, window, sinks, dimensions):
    costs = group_costs(KVSpec(*dimensions))
    draw = st.lists(st.integers(0, 2), min_size=3 * (prompt + steps), max_size=3 * (prompt + steps))
    actions = np.array(data.draw(draw), np.int8).reshape(-1, 3)
    cost = request_cost(costs, actions[:prompt], actions[prompt:], window, sinks, 77)
    expected = simulate(costs, actions[:prompt], actions[prompt:], window, sinks)
    assert {name: getattr(cost, name) for name in expected} == expected
    counts = (cost.prompt_tokens, cost.generated_tokens, cost.decode_steps, cost.allocated_bytes)
    assert counts == (prompt, steps, steps, 77)
    assert all(type(getattr(cost, name)) is int for name in expected)


def test_full_kv_costs_exactly_one():
    costs = group_costs(KVSpec(30, 3, 64))
    high = np.full((40, 3), HIGH, np.int8)
    cost = request_cost(costs, high[:30], high[30:], 16, 4)
    assert (cost.ratio_prefill, cost.ratio_decode, cost.ratio_total, cost.ratio_live, cost.ratio) == (1.0,) * 5


def test_a_long_request_is_exact_and_fast():
    costs = group_costs(KVSpec(40, 8, 128))
    low = np.full((140_000, 3), LOW, np.int8)
    cost = request_cost(costs, low[:100_000], low[100_000:], 0, 0)
    positions = sum(range(100_000 + 1, 140_000 + 1))
    assert cost.live_full == positions * costs.full  # about 6e16 bits: beyond float64's exact integers
    assert cost.live == (positions - 40_000) * sum(costs.low) + 40_000 * costs.full


def test_ratios_of_sums_not_sums_of_ratios():
    costs = Costs(low=(1,), high=(4,))
    short = request_cost(costs, np.zeros((0, 1), np.int8), np.full((1, 1), HIGH, np.int8), 0, 0, 10)
    long = request_cost(costs, np.zeros((0, 1), np.int8), np.full((9, 1), LOW, np.int8), 0, 0, 30)
    total = sum([short, long], Cost())
    assert total.ratio_decode == (4 + 9) / 40
    assert (total.allocated_bytes, total.generated_tokens, total.decode_steps) == (30, 10, 10)
    assert math.isnan(total.ratio_prefill)


def test_bad_actions_are_refused():
    costs = Costs(low=(1, 1), high=(4, 4))
    good = np.zeros((2, 2), np.int8)
    with pytest.raises(RequestError, match="3 layer groups, the costs have 2"):
        request_cost(costs, np.zeros((2, 3), np.int8), np.zeros((2, 3), np.int8), 1, 1)
    with pytest.raises(RequestError, match=r"decode_actions holds 0\.\.3"):
        request_cost(costs, good, np.array([[0, 3]], np.int8), 1, 1)
