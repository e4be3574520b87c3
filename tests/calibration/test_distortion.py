"""Runtime-D against attention recomputed in float64 outside the pipeline."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calibration.distortion import answer_pass, attention_change, members
from calibration.interventions import Trajectory
from jaxkv.models import Llama, LlamaConfig
from jaxkv.ops.quantize import dequantize, quantize


def attention(q, k, v, seen, scale):
    """One query over the entries that it sees, float64, zero where it sees none."""
    heads, kv_heads = q.shape[0], k.shape[1]
    out = np.zeros((heads, v.shape[2]))
    for h in range(heads):
        if not seen.any():
            continue
        scores = k[seen, h // (heads // kv_heads)] @ q[h] * scale
        weights = np.exp(scores - scores.max())
        out[h] = weights @ v[seen, h // (heads // kv_heads)] / weights.sum()
    return out


def low(x):
    return np.asarray(dequantize(*quantize(jnp.asarray(x, jnp.float32)), x.shape[-1]), np.float64)


def brute_force(q, k, v, visible, changed, scale):
    """Eq. 7's inner sum for one bucket: D(q, R), D(q, L)."""
    total = np.zeros(2)
    low_k, low_v = low(k), low(v)
    for u in range(len(q)):
        if not (changed[u] & visible[u]).any():
            continue
        reference = attention(q[u], k, v, visible[u], scale)
        mixed_k = np.where(changed[u][:, None, None], low_k, k)
        mixed_v = np.where(changed[u][:, None, None], low_v, v)
        outputs = (
            attention(q[u], k, v, visible[u] & ~changed[u], scale),
            attention(q[u], mixed_k, mixed_v, visible[u], scale),
        )
        total += [((reference - out) ** 2).sum(axis=-1).max() for out in outputs]
    return total


@pytest.mark.parametrize("seed", range(8))
def test_attention_change_equals_float64(seed):
    rng = np.random.default_rng(seed)
    kv_heads, group, width = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.choice([5, 8, 16]))
    queries, entries, buckets = int(rng.integers(1, 6)), int(rng.integers(2, 20)), 4
    q = rng.normal(size=(queries, kv_heads * group, width))
    k, v = rng.normal(size=(2, entries, kv_heads, width)) * rng.choice([0.1, 1, 10])
    visible = np.arange(entries)[None] <= rng.integers(0, entries, (queries, 1))
    changed = rng.random((buckets, queries, entries)) < rng.choice([0.1, 0.5, 0.9])
    changed[0] = False
    changed[1] = True  # everything released: the output is zero
    changed &= visible[None]
    found = attention_change(
        *(jnp.asarray(x, jnp.float32) for x in (q, k, v)), jnp.asarray(visible), jnp.asarray(changed), width**-0.5
    )
    expected = np.stack([brute_force(q, k, v, visible, changed[m], width**-0.5) for m in range(buckets)])
    np.testing.assert_allclose(np.asarray(found), expected, rtol=2e-3, atol=1e-5)
    assert not np.asarray(found)[0].any()


class Tiny:
    """What `answer_pass` needs of a model; hashed by identity, as a jitted function's static argument."""

    def __init__(self):
        self.config = LlamaConfig(
            num_layers=3, hidden_size=48, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=64,
            context=256, tie_embeddings=True,
        )  # fmt: skip
        self.module = Llama(self.config)
        self.attention_scale = 16**-0.5
        tokens = jnp.zeros((1, 2), jnp.int32)
        params = self.module.init(jax.random.key(1), tokens, tokens, lambda layer, q, k, v: q)["params"]
        self.params = jax.tree.map(lambda x: x * 8 if x.ndim == 2 and x.shape[0] != 64 else x, params)

    def forward(self, params, tokens, positions, attend, select):
        return self.module.apply({"params": params}, tokens, positions, attend, select=select)


def test_pipeline_equals_recomputed_attention():
    """Window, sinks, protected prompt tail, padding and multi-key tokens, with the real model code's q, k and v."""
    model, rng = Tiny(), np.random.default_rng(0)
    prompt, answer, window, sinks = 21, 13, 4, 2
    prompt_ids, token_ids = rng.integers(0, 64, prompt), rng.integers(0, 64, answer)
    labels = [(int(x),) for x in rng.integers(0, 3, prompt)]
    labels[9] = (0, 1)
    keys = [(int(x),) for x in rng.integers(0, 2, answer)]
    keys[3] = (0, 1)
    keys[5] = ()
    one = Trajectory(
        "case", tuple(prompt_ids), tuple(token_ids), tuple(keys), ("",) * answer, tuple(labels), answer, True
    )
    answer_member, prompt_member = members(one, 2)
    assert not answer_member[:, [3, 5]].any()
    assert not prompt_member[:, 9].any()

    seen = []

    def causal(layer, q, k, v):
        seen.append((q[0], k[0], v[0]))
        return jax.nn.dot_product_attention(q, k, v, scale=model.attention_scale, is_causal=True)

    whole = np.concatenate([prompt_ids, token_ids])[None].astype(np.int32)
    model.forward(model.params, jnp.asarray(whole), jnp.arange(prompt + answer)[None], causal, jnp.zeros(1, jnp.int32))
    seen = [tuple(np.asarray(x, np.float64) for x in layer) for layer in seen]

    expected = np.zeros((3, 2 + prompt_member.shape[0], 2))
    position = np.arange(prompt + answer)
    for layer, (q, k, v) in enumerate(seen):
        for m in range(expected.shape[1]):
            member = np.zeros(prompt + answer, bool)
            if m < 2:
                member[prompt:] = answer_member[m]
            else:
                member[:prompt] = prompt_member[m - 2]
                member[prompt - window :] = False
            member[:sinks] = False
            visible = position[None] <= position[prompt:, None]
            changed = member[None] & (position[None] < position[prompt:, None] - window)
            expected[layer, m] = brute_force(q[prompt:], k, v, visible, changed & visible, model.attention_scale)

    steps, padded = 16, 32
    pad = [(0, padded - prompt), (0, 0), (0, 0)]
    found = answer_pass(
        model,
        model.params,
        np.pad(token_ids, (0, steps - answer))[None].astype(np.int32),
        np.int32(answer),
        tuple(np.pad(k[:prompt], pad).astype(np.float32) for _, k, _ in seen),
        tuple(np.pad(v[:prompt], pad).astype(np.float32) for _, _, v in seen),
        np.int32(prompt),
        np.pad(answer_member, [(0, 0), (0, steps - answer)]),
        np.pad(prompt_member, [(0, 0), (0, padded - prompt)]),
        window,
        sinks,
    )
    np.testing.assert_allclose(np.asarray(found), expected, rtol=5e-3, atol=1e-6)
    assert (expected[:, :2] > 0).all()
    assert (expected[:, 2:5] > 0).all()
    assert not expected[:, 5:].any()


def test_a_case_is_affected_only_where_its_run_reads_a_changed_token():
    one = Trajectory(
        "case", (1,) * 10, (1,) * 8, ((0,), (0, 1), (1,), (2,), (2,), (2,), (2,), (3,)), ("",) * 8,
        ((0,),) * 3 + ((1,),) * 3 + ((2,),) * 4, 8, True,
    )  # fmt: skip
    assert one.affected("decode", 0, 4, 2)
    assert one.affected("decode", 1, 4, 2)  # token 2 leaves a window of 4 before the end
    assert not one.affected("decode", 3, 4, 2)
    assert not dataclasses.replace(one, decided=4).affected("decode", 0, 4, 2)
    assert one.affected("prompt", 0, 4, 2)
    assert not one.affected("prompt", 0, 4, 3)
    assert one.affected("prompt", 1, 4, 2)
    assert not one.affected("prompt", 2, 4, 2)
