"""The Llama backbone against transformers: same checkpoint, same logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxkv.errors import ModelError
from jaxkv.models import LlamaConfig, causal_attention, load_model
from jaxkv.models.layers import RopeScaling, rope_frequencies

TOLERANCE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def full_forward(model, tokens, lengths=None, select=None, capture=None):
    @jax.jit
    def run(params, tokens):
        hidden = []
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def attend(layer, q, k, v):
            return causal_attention(q, k, v, lengths, scale=model.attention_scale)

        return model.forward(params, tokens, positions, attend, select=select, capture=hidden), hidden

    logits, hidden = run(model.params, jnp.asarray(tokens))
    if capture is not None:
        capture.extend(hidden)
    return logits


def reference(torch_model, tokens):
    with torch.no_grad():
        return torch_model(torch.tensor(np.asarray(tokens)), output_hidden_states=True)


def random_tokens(rows, count, vocab=258, seed=0):
    return np.random.default_rng(seed).integers(0, vocab, (rows, count))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"num_key_value_heads": 6}, id="group-1"),
        pytest.param({"num_key_value_heads": 3, "tie_word_embeddings": True}, id="group-2-tied"),
        pytest.param({"num_key_value_heads": 2, "rope_parameters": LLAMA3}, id="group-3-llama3"),
        pytest.param({"num_attention_heads": 8, "num_key_value_heads": 2, "attention_bias": True}, id="group-4-bias"),
        pytest.param(
            {
                "head_dim": 16,
                "mlp_bias": True,
                "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
            },
            id="wide-heads-linear-rope",
        ),
    ],
)
def test_logits_equal_transformers(save_llama, changes):
    folder, torch_model = save_llama(**changes)
    model = load_model(folder, dtype="float32")
    tokens = random_tokens(2, 200)
    logits = full_forward(model, tokens)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, reference(torch_model, tokens).logits, atol=TOLERANCE, rtol=0)


def test_old_spelling_of_rope_scaling(save_llama, edit_config):
    folder, torch_model = save_llama(rope_parameters=LLAMA3)
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    edit_config(folder, rope_parameters=None, rope_theta=500_000.0, rope_scaling=scaling)
    tokens = random_tokens(1, 150)
    logits = full_forward(load_model(folder, dtype="float32"), tokens)
    np.testing.assert_allclose(logits, reference(torch_model, tokens).logits, atol=TOLERANCE, rtol=0)


def test_llama3_rope_keeps_short_wavelengths_and_stretches_long_ones():
    plain = rope_frequencies(64, 500_000.0)
    scaled = rope_frequencies(64, 500_000.0, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192))
    assert scaled[0] == plain[0]
    np.testing.assert_allclose(scaled[-1], plain[-1] / 8, rtol=1e-6)
    assert np.all((scaled <= plain) & (scaled >= plain / 8 * (1 - 1e-6)))


def test_sharded_checkpoint(save_llama):
    folder, torch_model = save_llama(shard=40_000)
    assert len(list(folder.glob("*.safetensors"))) > 1
    tokens = random_tokens(1, 20)
    logits = full_forward(load_model(folder, dtype="float32"), tokens)
    np.testing.assert_allclose(logits, reference(torch_model, tokens).logits, atol=TOLERANCE, rtol=0)


def test_select_is_the_logits_of_that_token(save_llama):
    model = load_model(save_llama()[0], dtype="float32")
    tokens = random_tokens(3, 12)
    everywhere = full_forward(model, tokens)
    select = jnp.array([11, 0, 5])
    np.testing.assert_allclose(
        full_forward(model, tokens, select=select), everywhere[jnp.arange(3), select], atol=1e-5, rtol=0
    )


def test_capture_is_the_hidden_state_after_each_layer(save_llama):
    folder, torch_model = save_llama()
    model = load_model(folder, dtype="float32")
    tokens, capture = random_tokens(2, 9), []
    full_forward(model, tokens, capture=capture)
    expected = reference(torch_model, tokens).hidden_states
    assert len(capture) == len(expected) == model.config.num_layers + 1
    # transformers applies the final norm to the last one.
    for ours, theirs in zip(capture[:-1], expected[:-1], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)


def test_padding_on_the_right_changes_nothing(save_llama):
    model = load_model(save_llama()[0], dtype="float32")
    tokens = random_tokens(1, 10)
    padded = np.pad(tokens, ((0, 0), (0, 6)), constant_values=7)
    ours = full_forward(model, padded, jnp.array([10], jnp.int32))
    np.testing.assert_allclose(ours[:, :10], full_forward(model, tokens), atol=1e-5, rtol=0)
    assert np.isfinite(ours).all()


def test_a_cache_behind_attend_reproduces_the_full_forward(save_llama):
    """One token at a time, with absolute positions and keys that the caller kept, gives the full pass's logits."""
    model = load_model(save_llama()[0], dtype="float32")
    tokens = jnp.asarray(random_tokens(2, 7))

    @jax.jit
    def step(params, token, t, cache):
        def attend(layer, q, k, v):
            cache[layer] = tuple(old.at[:, t].set(new[:, 0]) for old, new in zip(cache[layer], (k, v), strict=True))
            seen = jnp.full((2,), t + 1)
            return jax.nn.dot_product_attention(
                q, *cache[layer], scale=model.attention_scale, key_value_seq_lengths=seen
            )

        return model.forward(params, token, jnp.full((2, 1), t), attend), cache

    whole = full_forward(model, tokens)
    cache = [(jnp.zeros((2, 7, 2, 8)),) * 2 for _ in range(model.config.num_layers)]
    for t in range(7):
        logits, cache = step(model.params, tokens[:, t : t + 1], t, cache)
        np.testing.assert_allclose(logits[:, 0], whole[:, t], atol=1e-5, rtol=0)


def test_bfloat16_is_close_and_logits_stay_float32(save_llama):
    folder, torch_model = save_llama(initializer_range=0.05)
    model = load_model(folder, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype("bfloat16")}
    tokens = random_tokens(1, 30)
    logits = full_forward(model, tokens)
    expected = reference(torch_model, tokens).logits.numpy()
    assert logits.dtype == jnp.float32
    assert np.abs(logits - expected).max() < 0.05 * np.abs(expected).max()


CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'.*default, linear, llama3"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high_freq_factor"),
        (
            {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}},
            "original_max_position_embeddings",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
        ({"hidden_act": "gelu"}, "'gelu'.*silu"),
        ({"num_key_value_heads": 3}, "4 query heads.*3 KV heads"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"vocab_size": None, "hidden_size": None}, "lacks hidden_size, vocab_size"),
    ],
)
def test_impossible_configurations_are_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        LlamaConfig.from_hf(CONFIG | changes)


def test_config_is_read_and_hashable():
    config = LlamaConfig.from_hf(CONFIG | {"rope_scaling": LLAMA3})
    assert (config.head_dim, config.context, config.attention_scale) == (8, 128, 8**-0.5)
    assert hash(config) == hash(LlamaConfig.from_hf(CONFIG | {"rope_scaling": LLAMA3}))
