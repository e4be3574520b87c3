"""A tiny random Llama with the real tokenizer: everything but the quality of its answers is real."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxkv.grammar.function_calling import FunctionCalls
from jaxkv.models import Llama, LlamaConfig

TOOLS = [
    {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Oslo", "Lima"]},
                "days": {"enum": [1, 2, 3]},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "days"],
        },
    },
    {
        "name": "play.music",
        "description": "Play a song.",
        "parameters": {"type": "object", "properties": {"loud": {"type": "boolean"}}, "required": ["loud"]},
    },
]


@pytest.fixture(scope="session")
def tiny(smollm2):
    """Three layers, 4 query and 2 KV heads of width 16; random float32 weights."""
    config = LlamaConfig(
        num_layers=3,
        hidden_size=48,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=smollm2.config.vocab_size,
        context=512,
        tie_embeddings=True,
    )
    module = Llama(config)
    tokens = jnp.zeros((1, 2), jnp.int32)
    params = module.init(jax.random.key(3), tokens, tokens, lambda layer, q, k, v: q)["params"]
    # Larger weights than the initialiser's, so that attention matters and ties are unlikely.
    params = jax.tree.map(lambda x: x * 8 if x.ndim == 2 and x.shape[0] != config.vocab_size else x, params)
    return dataclasses.replace(smollm2, config=config, params=params, module=module, name="tiny", fingerprint="tiny")


@pytest.fixture(scope="session")
def calls(smollm2):
    """Lists of calls of two tools whose sentences are finite."""
    return FunctionCalls(TOOLS, smollm2.tokenizer, parallel=True, max_calls=4)
