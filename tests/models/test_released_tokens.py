"""Decoding over a compressed cache, against transformers with the same tokens masked out of attention.

NVIDIA/kvpress#16 and #264: positions are tokens seen, not tokens kept, and a short context never leaves an empty cache.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxkv.engine import steps
from jaxkv.models import load_model
from jaxkv.state.actions import HIGH, RELEASE
from jaxkv.state.kv_state import init_state
from jaxkv.state.payload import KVSpec
from jaxkv.state.transfer import set_pending

WINDOW, SINKS = 4, 2


def decode(model, tokens, prompt_length, actions):
    """Teacher-forced logits after each token from the prompt's last on, with an action for every token."""
    config = model.config
    spec = KVSpec(config.num_layers, config.num_kv_heads, config.head_dim)
    state = init_state(spec, rows=1, window=WINDOW, sinks=SINKS, high_slots=128, low_slots=0, dtype="float32")
    padded = np.zeros((1, 64), np.int32)
    padded[0, :prompt_length] = tokens[:prompt_length]
    plan = np.full((64, 3), HIGH, np.int8)
    plan[:prompt_length] = actions[:prompt_length, None]
    length = np.asarray([prompt_length], np.int32)
    first, k, v = steps.prompt_pass(model, model.params, padded, length, "float32")
    state, logits = steps.admit(state, jnp.zeros_like(first), 0, k, v, plan, prompt_length, first)
    collected, held, active = [np.asarray(logits[0])], [], jnp.asarray([True])
    for position in range(prompt_length, len(tokens)):
        held.append(
            sorted(int(p) for x in (state.high_position[0], state.recent_position) for p in np.asarray(x)[0] if p >= 0)
        )
        one = jnp.asarray(tokens[position : position + 1], jnp.int32)
        logits, state = steps.forward(model, model.params, state, one, active)
        action = jnp.full((1, 3), int(actions[position]), jnp.int8)
        state = set_pending(state, action, active)
        collected.append(np.asarray(logits[0]))
    return np.stack(collected), held


@pytest.mark.parametrize("prompt_length", [1, 3, 30])
def test_logits_equal_transformers_with_the_released_tokens_masked(save_llama, prompt_length):
    folder, reference = save_llama()
    reference.set_attn_implementation("eager")
    model = load_model(folder, dtype="float32")
    rng = np.random.default_rng(prompt_length)
    tokens = rng.integers(0, 256, 60)
    actions = np.where(rng.random(60) < 0.25, HIGH, RELEASE)
    logits, held = decode(model, tokens, prompt_length, actions)

    query, key = np.arange(60)[:, None], np.arange(60)[None]
    seen = (key <= query) & ((key >= query - WINDOW) | (key < SINKS) | (actions[None] == HIGH))
    # The prompt pass itself is at full precision and sees all of the prompt.
    seen |= (key <= query) & (query < prompt_length)
    mask = torch.tensor(np.where(seen, 0.0, torch.finfo(torch.float32).min), dtype=torch.float32)[None, None]
    with torch.inference_mode():
        expected = reference(torch.tensor(tokens)[None], attention_mask=mask).logits[0].numpy()
    np.testing.assert_allclose(logits, expected[prompt_length - 1 :], atol=2e-4, rtol=1e-4)
    for position, positions in enumerate(held, start=prompt_length):
        assert positions == np.flatnonzero(seen[position, :position]).tolist()
        assert positions, "never an empty cache"
