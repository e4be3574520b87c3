"""Rows of a batched decode step are the rows computed one by one, at widths where XLA picks its batched kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models import Llama, LlamaConfig
from jaxkv.ops.mixed_attention import mixed_attention
from jaxkv.state.kv_state import init_state
from jaxkv.state.payload import KVSpec
from jaxkv.state.transfer import fill_row

LAYERS, HEADS, WIDTH = 2, 3, 64


@pytest.fixture(scope="module")
def wide():
    """Two layers of SmolLM2-135M's shape, random weights large enough for attention to matter."""
    config = LlamaConfig(
        num_layers=LAYERS,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=HEADS,
        head_dim=WIDTH,
        vocab_size=512,
        context=2048,
        tie_embeddings=True,
    )
    module = Llama(config)
    tokens = jnp.zeros((1, 2), jnp.int32)
    params = module.init(jax.random.key(3), tokens, tokens, lambda layer, q, k, v: q)["params"]
    params = jax.tree.map(lambda x: x * 8 if x.ndim == 2 and x.shape[0] != config.vocab_size else x, params)
    return module, params


@pytest.mark.parametrize("implementation", ["xla", "triton_interpret"])
@pytest.mark.parametrize(
    ("rows", "high", "low", "low_every"),
    [(8, 128, 64, 3), (8, 128, 0, 0), (8, 0, 128, 1), (32, 128, 64, 3), (8, 4096, 640, 3)],
    ids=["both", "high", "low", "32_rows", "blocks"],
)
def test_rows_of_a_batch_equal_single_rows(wide, rows, high, low, low_every, implementation):
    if implementation == "triton_interpret" and (rows, high) != (8, 128):
        pytest.skip("interpreted kernels are slow; two shapes suffice")
    module, params = wide
    rng = np.random.default_rng(0)
    state = init_state(
        KVSpec(LAYERS, HEADS, WIDTH), rows=rows, window=16, sinks=0, high_slots=high, low_slots=low, dtype="float32"
    )
    fill, prompt = jax.jit(fill_row), 96
    kind = np.full(prompt, 2, np.int8) if not low_every else np.where(np.arange(prompt) % low_every == 0, 1, 2)
    actions = np.repeat(kind[:, None].astype(np.int8), 3, axis=1)
    for row in range(rows):
        k, v = rng.normal(size=(2, LAYERS, prompt, HEADS, WIDTH)).astype(np.float32)
        state = fill(state, row, list(k), list(v), actions, 60 + row % 30)
    assert not np.asarray(state.fault).any()

    def step(params, state, tokens):
        position = state.length[:, None]

        def attend(layer, q, k, v):
            return mixed_attention(
                q, state.layer(layer), position, new_kv=(k, v), scale=WIDTH**-0.5, implementation=implementation
            )

        return module.apply({"params": params}, tokens[:, None], position, attend, select=jnp.zeros_like(state.length))

    step = jax.jit(step)
    tokens = jnp.arange(rows) + 5
    together = np.asarray(step(params, state, tokens))
    for row in (0, 1, rows - 1):
        one = jax.tree.map(lambda x, row=row: x[row : row + 1], state)
        alone = np.asarray(step(params, one, tokens[row : row + 1]))[0]
        np.testing.assert_allclose(together[row], alone, atol=1e-4)
