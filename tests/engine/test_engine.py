"""The engine on a tiny model: batches, policies, capacity, faults, and what a step costs host and compiler."""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.engine import Engine, Request, generate, steps
from jaxkv.errors import RequestError
from jaxkv.ops import blocks
from jaxkv.policies.full import FullKV
from jaxkv.policies.pask.policy import Pask
from jaxkv.policies.pask.table import Entry
from jaxkv.policies.registry import load_policy
from jaxkv.state.actions import HIGH, LOW, RELEASE
from jaxkv.state.kv_state import init_state
from jaxkv.state.payload import KVSpec, group_costs
from jaxkv.state.transfer import restore, snapshot

PROMPTS = [[(7 * i + j * j) % 4000 + 100 for i in range(n)] for j, n in enumerate((9, 40, 70, 23, 55))]


@dataclasses.dataclass(frozen=True)
class Scripted(FullKV):
    """A policy whose actions repeat a fixed pattern by generated token and group; prompts stay HIGH."""

    name: str = "scripted"
    pattern: tuple[tuple[int, ...], ...] = ((HIGH, LOW, RELEASE), (RELEASE, HIGH, LOW), (LOW, RELEASE, HIGH))
    window: int = 4
    sinks: int = 2

    @property
    def expected_actions(self) -> np.ndarray:
        # Nothing is expected, so that every slot comes from growth.
        return np.zeros((2, len(self.groups)))

    def init(self, rows):
        return jnp.zeros(rows, jnp.int32)

    def reset_row(self, policy_state, row):
        return policy_state.at[row].set(0)

    def step(self, policy_state, tag_ids, parser_state, active):
        pattern = jnp.asarray(self.pattern, jnp.int8)
        return pattern[policy_state % len(self.pattern)], policy_state + active.astype(jnp.int32)


def run(model, policy, requests, rows, **options):
    engine = Engine(model, policy, rows=rows, **options)
    return {result.request_id: result for result in engine.run(requests)}, engine


def requests_for(calls=None, **options):
    return [
        Request(prompt_ids=ids, constraint=calls, request_id=str(i), max_new_tokens=30 + 3 * i, **options)
        for i, ids in enumerate(PROMPTS)
    ]


def test_a_row_of_a_batch_equals_its_solo_run(tiny, calls):
    """NVIDIA/kvpress#25, jy-yuan/KIVI#18: neither batch size, nor row, nor padding changes a row's tokens."""
    together, _ = run(tiny, load_policy("structural-prior", tiny), requests_for(calls), rows=2)
    alone, _ = run(tiny, load_policy("structural-prior", tiny), requests_for(calls), rows=1)
    assert set(together) == {"0", "1", "2", "3", "4"}
    for name, result in together.items():
        assert result.token_ids == alone[name].token_ids
        assert result.tokens == alone[name].tokens, "actions and tags too"
        assert dataclasses.replace(result.cost, allocated_bytes=0) == dataclasses.replace(
            alone[name].cost, allocated_bytes=0
        )


def test_all_high_gives_full_kvs_tokens(tiny, calls):
    for rows in (1, 2):
        full, _ = run(tiny, load_policy("full"), requests_for(calls), rows)
        high, _ = run(tiny, load_policy("all_high", tiny), requests_for(calls), rows)
        assert {n: r.token_ids for n, r in full.items()} == {n: r.token_ids for n, r in high.items()}
        assert all(r.cost.ratio_total == r.cost.ratio_live == 1 for r in high.values())


def test_answers_parse_and_limits_are_named(tiny, calls):
    results, _ = run(tiny, load_policy("all_high", tiny), requests_for(calls), rows=2)
    reasons = {r.finish_reason for r in results.values()}
    assert reasons <= {"stop", "length"}
    for result in results.values():
        if result.finish_reason == "stop":
            assert all(call["name"] in ("get_weather", "play.music") for call in result.calls)
        else:
            assert result.calls is None
            assert len(result.token_ids) == 30 + 3 * int(result.request_id)
    short = generate(tiny, [{"role": "user", "content": "hi"}], constraint=calls, policy="all_high", max_new_tokens=2)
    assert (short.finish_reason, len(short.token_ids), short.calls) == ("length", 2, None)


def test_an_answer_of_exactly_the_limit_is_complete(tiny, calls):
    request = Request(prompt_ids=PROMPTS[0], constraint=calls, max_new_tokens=200)
    (free,) = Engine(tiny, load_policy("full"), rows=1).run([request])
    assert free.finish_reason == "stop"
    exact = dataclasses.replace(request, max_new_tokens=len(free.token_ids))
    (result,) = Engine(tiny, load_policy("full"), rows=1).run([exact])
    assert (result.finish_reason, result.calls) == ("stop", free.calls)
    (cut,) = Engine(tiny, load_policy("full"), rows=1).run(
        [dataclasses.replace(request, max_new_tokens=len(free.token_ids) - 1)]
    )
    assert cut.finish_reason == "length"


def test_a_failing_request_fails_alone(tiny, calls):
    good = requests_for(calls)
    bad = {
        "exceeds the model's context of 512": Request(prompt_ids=[5] * 600, constraint=calls),
        "no constraint": Request(prompt_ids=[5]),
        "give exactly one": Request(constraint=calls),
        "prompt is empty": Request(prompt_ids=[], constraint=calls),
        "outside the vocabulary": Request(prompt_ids=[10**6], constraint=calls),
        "max_new_tokens is 0": Request(prompt_ids=[5], constraint=calls, max_new_tokens=0),
        "temperature is -1": Request(prompt_ids=[5], constraint=calls, temperature=-1.0),
        "top_p is 0": Request(prompt_ids=[5], constraint=calls, top_p=0.0),
        "seed is -1": Request(prompt_ids=[5], constraint=calls, seed=-1),
        "no messages": Request(messages=[], constraint=calls),
    }
    mixed = []
    for i, (request, text) in enumerate(zip(bad.values(), bad, strict=True)):
        mixed.append(dataclasses.replace(request, request_id=text))
        mixed.extend(good[i : i + 1])
    policy = load_policy("all_high", tiny)
    results, _ = run(tiny, policy, mixed, rows=2)
    alone, _ = run(tiny, policy, good, rows=2)
    for text in bad:
        assert results[text].finish_reason == "error"
        assert text in results[text].error
    assert {n: results[n].token_ids for n in alone} == {n: r.token_ids for n, r in alone.items()}
    with pytest.raises(RequestError, match="there are no messages"):
        generate(tiny, [], constraint=calls)


def test_a_row_whose_numbers_leave_int4_fails_alone(tiny, calls):
    """A fault on the device ends its own row, named, and nobody else's."""

    # Keys of layer 1 are so large that their INT4 scale overflows FP16.
    params = dict(tiny.params)
    k_weight = params["layer_1"]["attention"]["k"]["weight"]
    params["layer_1"] = {
        **params["layer_1"],
        "attention": {**params["layer_1"]["attention"], "k": {"weight": k_weight * 1e7}},
    }
    broken = dataclasses.replace(tiny, params=params)
    low = Scripted(pattern=((LOW,) * 3,), sinks=0)
    requests = [Request(prompt_ids=PROMPTS[0], constraint=calls, request_id="0", max_new_tokens=20)]
    results, _ = run(broken, low, requests, rows=2)
    assert results["0"].finish_reason == "error"
    assert "layer 1:" in results["0"].error


def test_growth_changes_no_token(tiny, calls):
    """Slots that come from growth in the middle of a run, and slots that were there at once."""

    @dataclasses.dataclass(frozen=True)
    class Expecting(Scripted):
        @property
        def expected_actions(self):
            return np.ones((2, 3))

    requests = [dataclasses.replace(r, max_new_tokens=110) for r in requests_for(None)[:2]]
    grown, engine = run(tiny, Scripted(), requests, rows=2)
    ready, roomy = run(tiny, Expecting(), requests, rows=2)
    assert {n: r.token_ids for n, r in grown.items()} == {n: r.token_ids for n, r in ready.items()}
    assert all(r.error is None for r in grown.values())
    assert engine.peak_bytes < roomy.peak_bytes
    assert {len(r.token_ids) for r in grown.values()} == {110}


def test_live_payload_is_what_the_partitions_hold(tiny):
    """The host's account of live payload, against the slot maps of the device after every step."""
    policy = Scripted()
    costs = group_costs(KVSpec(3, 2, 16))
    held = []
    engine = Engine(tiny, policy, rows=1)
    forward = steps.forward

    def counting(model, params, state, *arguments):
        # What attention reads in this step: the state as it comes in, and the token being computed.
        ring = int((np.asarray(state.recent_position) >= 0).sum()) + 1
        high = [int((np.asarray(p) >= 0).sum()) + ring for p in state.high_position]
        low = [int((np.asarray(p) >= 0).sum()) for p in state.low_position]
        held.append(sum(h * a + l * b for h, a, l, b in zip(high, costs.high, low, costs.low, strict=True)))
        return forward(model, params, state, *arguments)

    steps.forward = counting
    try:
        (result,) = engine.run([Request(prompt_ids=PROMPTS[1], max_new_tokens=25)])
    finally:
        steps.forward = forward
    assert result.cost.live == sum(held)
    assert len(held) == 25
    assert result.cost.decode < result.cost.decode_full


def test_nothing_recompiles_while_decoding(tiny, calls):
    engine = Engine(tiny, load_policy("all_high", tiny), rows=2)
    list(engine.run(requests_for(calls)))
    counts = [f._cache_size() for f in (steps.forward, steps.choose, steps.admit, steps.prompt_pass)]
    engine.step_seconds.clear()
    list(engine.run([dataclasses.replace(r, seed=9, temperature=0.8, top_p=0.9) for r in requests_for(calls)]))
    assert [f._cache_size() for f in (steps.forward, steps.choose, steps.admit, steps.prompt_pass)] == counts
    assert len(engine.step_seconds) > 50


def test_inactive_rows_are_inert(tiny):
    """vllm-project/vllm#11060: a finished row's state does not change while its neighbours go on."""
    state = init_state(KVSpec(3, 2, 16), rows=2, window=4, sinks=2, high_slots=64, low_slots=64, dtype="float32")
    tokens = jnp.asarray([17, 23], jnp.int32)
    for _ in range(9):
        _, state = steps.forward(tiny, tiny.params, state, tokens, jnp.asarray([True, True]))
    frozen = jax.tree.map(lambda x: np.asarray(x)[1].copy(), state)
    for _ in range(7):
        _, state = steps.forward(tiny, tiny.params, state, tokens, jnp.asarray([True, False]))
    after = jax.tree.map(lambda x: np.asarray(x)[1], state)
    jax.tree.map(np.testing.assert_array_equal, frozen, after)
    assert np.asarray(state.length).tolist() == [16, 9]


def test_rollback_gives_the_same_tokens_again(tiny, calls):
    """State, ledger, pending actions and grammar go back together, across window expiries (PASK B.7)."""
    policy = load_policy("structural-prior", tiny).bind(KVSpec(3, 2, 16), 512)
    state = init_state(
        KVSpec(3, 2, 16), rows=1, window=policy.window, sinks=4, high_slots=128, low_slots=128, dtype="float32"
    )
    matcher, ledger = calls.start(), policy.init(1)
    active = jnp.asarray([True])
    words = np.zeros((1, -(-tiny.config.vocab_size // 32)), np.int32)
    zero = jnp.zeros(1, jnp.float32)

    def advance(token, state, ledger):
        logits, state = steps.forward(tiny, tiny.params, state, jnp.asarray([token], jnp.int32), active)
        ids, parser_state = policy.encode(matcher.accept(token))
        matcher.fill_mask(words[0])
        packed, ledger, pending = steps.choose(
            policy.step, ledger, state.pending, state.length, state.fault, logits, jnp.asarray(words),
            jnp.asarray(ids[None]), jnp.asarray([parser_state], jnp.int32), active, zero, zero + 1,
            jnp.zeros(1, jnp.uint32), jnp.zeros(1, jnp.int32),
        )  # fmt: skip
        return np.asarray(packed)[0], dataclasses.replace(state, pending=pending), ledger

    def go(token, state, ledger, count):
        seen = []
        for _ in range(count):
            if token in tiny.tokenizer.stop_ids:
                break
            packed, state, ledger = advance(token, state, ledger)
            token = int(packed[0])
            seen.append(packed.tolist())
        return seen, state, ledger

    matcher.fill_mask(words[0])
    first = int(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))[0])
    before, state, ledger = go(first, state, ledger, 12)
    saved = snapshot((state, ledger))
    taken = matcher.tokens
    once, state, ledger = go(before[-1][0], state, ledger, 24)
    assert len(once) > 18, "the rollback crosses the window"
    matcher.rollback(matcher.tokens - taken)
    state, ledger = restore(saved)
    again, state, ledger = go(before[-1][0], state, ledger, 24)
    assert once == again


def test_streaming_tells_each_token_once_and_in_order(tiny, calls):
    told = {}
    engine = Engine(tiny, load_policy("all_high", tiny), rows=2)
    results = list(engine.run(requests_for(calls), lambda name, record: told.setdefault(name, []).append(record)))
    assert {r.request_id: list(r.tokens) for r in results} == told
    assert all("".join(t.text for t in r.tokens) == r.text for r in results)


def test_sampling_depends_on_the_seed_alone(tiny, calls):
    sampled = requests_for(calls, temperature=1.0, top_p=0.95, seed=11)
    together, _ = run(tiny, load_policy("full"), sampled, rows=2)
    alone, _ = run(tiny, load_policy("full"), sampled, rows=1)
    other, _ = run(tiny, load_policy("full"), [dataclasses.replace(r, seed=12) for r in sampled], rows=2)
    assert {n: r.token_ids for n, r in together.items()} == {n: r.token_ids for n, r in alone.items()}
    assert any(other[n].token_ids != together[n].token_ids for n in other)


def test_an_abandoned_run_leaves_a_usable_engine(tiny, calls):
    engine = Engine(tiny, load_policy("all_high", tiny), rows=2)
    running = engine.run(requests_for(calls))
    next(running)
    running.close()
    again = {r.request_id: r.token_ids for r in engine.run(requests_for(calls))}
    fresh, _ = run(tiny, load_policy("all_high", tiny), requests_for(calls), rows=2)
    assert again == {n: r.token_ids for n, r in fresh.items()}


def test_allocated_bytes_are_the_buffers(tiny, calls):
    """SalesforceAIResearch/ThinK#5, FasterDecoding/SnapKV#16, jy-yuan/KIVI#36.

    Savings show in allocated buffers, scales and slot maps counted; KV heads are stored, not query heads; the prompt's
    scratch is bounded and reported.
    """
    assert all(x.high_k.shape[1] == 2 for x in Engine(tiny, load_policy("full"), rows=2).state.layers)
    results, engine = run(tiny, load_policy("full"), requests_for(calls), rows=2)
    nbytes = sum(x.nbytes for x in jax.tree.leaves(engine.state))
    assert engine.peak_bytes == nbytes == max(r.cost.allocated_bytes for r in results.values())
    assert engine.prefill_scratch_bytes == 2 * 3 * 128 * 2 * 16 * 4, "one padded prompt of 70 tokens, K and V"


@pytest.mark.parametrize("rows", [1, 2])
def test_a_decode_step_copies_no_partition(tiny, rows, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)  # a block of attention is no copy; small ones hide none
    """Attention reads what the step then overwrites: donated buffers are updated in place, with no duplicate."""
    state = init_state(KVSpec(3, 2, 16), rows=rows, window=4, sinks=2, high_slots=4096, low_slots=4096, dtype="float32")
    tokens, active = jnp.zeros(rows, jnp.int32), jnp.ones(rows, bool)
    memory = steps.forward.lower(tiny, tiny.params, state, tokens, active).compile().memory_analysis()
    held = sum(x.nbytes for x in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= 0.99 * held
    assert memory.temp_size_in_bytes - rows * 4 * tiny.config.vocab_size < 0.1 * held


def test_prompt_labels_reach_a_policy_that_asks_for_them(tiny, calls):
    """PASK 3.6: a function document in the prompt is told from the text around it."""
    entry = lambda action: (Entry(action, action, (0.0, 0.0)),) * 3  # noqa: E731
    frozen = dataclasses.replace(
        load_policy("structural-prior").frozen,
        prompt={"protected_content": entry(HIGH), "schema_scaffold": entry(LOW), "schema_description": entry(RELEASE)},
        budget_prompt=Fraction(0),
        window=2,
    )
    text = 'Use this.\n{"name": "f", "description": "Adds many numbers to each other.", "parameters": {}}\nPlease.'
    ids = tiny.tokenizer.encode(text)
    request = Request(prompt_ids=ids, constraint=calls, request_id="labels", max_new_tokens=2)
    results, _ = run(tiny, Pask(frozen), [request], rows=1)
    actions = results["labels"].prompt_actions[:, 0]
    pieces = tiny.tokenizer.texts(ids)
    inside = [action for action, piece in zip(actions, pieces, strict=True) if piece in (" many", " numbers", " each")]
    assert inside == [RELEASE] * 3
    assert (actions[:2] == HIGH).all()
    assert LOW in actions
