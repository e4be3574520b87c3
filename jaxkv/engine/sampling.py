"""Choosing the next token on the device, under a grammar's mask."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

MASKED = float(jnp.finfo(jnp.float32).min)


def unpack_mask(words: Int[Array, "B N"], vocab_size: int) -> Bool[Array, "B V"]:
    """Mask words as XGrammar fills them, bit i of word w for token 32 w + i, to one boolean a token."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :vocab_size] == 1


def sample(
    logits: Float[Array, "B V"],
    words: Int[Array, "B N"],
    temperature: Float[Array, "B"],
    top_p: Float[Array, "B"],
    seed: UInt32[Array, "B"],
    index: Int[Array, "B"],
) -> Int[Array, "B"]:
    """The next token of each row.

    Temperature 0 takes the permitted token of the largest logit, the lowest id among equals. Otherwise the smallest set
    of permitted tokens whose probability reaches `top_p` is sampled, with a key made from the row's `seed` and the
    token's `index` alone.
    """
    logits = jnp.where(unpack_mask(words, logits.shape[1]), logits, MASKED)
    greedy = jnp.argmax(logits, axis=1).astype(jnp.int32)

    def one(row: Array, t: Array, p: Array, s: Array, i: Array) -> Array:
        scaled = jnp.where(row > MASKED, row / jnp.maximum(t, 1e-6), MASKED)
        order = jnp.argsort(-scaled)
        probability = jax.nn.softmax(scaled[order])
        before = jnp.cumsum(probability) - probability
        kept = jnp.where((before < p) & (scaled[order] > MASKED), scaled[order], MASKED)
        key = jax.random.fold_in(jax.random.key(s), i)
        return order[jax.random.categorical(key, kept)].astype(jnp.int32)

    # Sorting the vocabulary costs more than the rest of the step: skipped when no row asks for it.
    drawn = lax.cond(
        jnp.any(temperature > 0),
        lambda: jax.vmap(one)(logits, temperature, top_p, seed, index),
        lambda: greedy,
    )
    return jnp.where(temperature > 0, drawn, greedy)
