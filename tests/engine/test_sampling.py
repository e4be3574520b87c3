"""The next token: masks, greedy ties, nucleus, and keys that depend on the row's own seed and index alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.engine.sampling import sample, unpack_mask

VOCABULARY = 100
jit_sample = jax.jit(sample)


def words_of(permitted: np.ndarray) -> jnp.ndarray:
    bits = np.zeros((len(permitted), 128), bool)
    bits[:, :VOCABULARY] = permitted
    return jnp.asarray(np.packbits(bits, axis=1, bitorder="little").view(np.int32))


def draw(logits, permitted, temperature=1.0, top_p=1.0, seeds=None, index=0):
    rows = len(logits)
    return np.asarray(
        jit_sample(
            jnp.asarray(logits, jnp.float32),
            words_of(permitted),
            jnp.full(rows, temperature, jnp.float32),
            jnp.full(rows, top_p, jnp.float32),
            jnp.asarray(np.arange(rows) if seeds is None else seeds, jnp.uint32),
            jnp.full(rows, index, jnp.int32),
        )
    )


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_mask_words(rng):
    permitted = rng.random((7, VOCABULARY)) < 0.5
    permitted[0] = [i in (0, 31, 32, 63, 99) for i in range(VOCABULARY)]
    np.testing.assert_array_equal(unpack_mask(words_of(permitted), VOCABULARY), permitted)


def test_greedy_takes_the_best_permitted_token_and_the_lowest_of_equals(rng):
    logits = rng.standard_normal((50, VOCABULARY)).round(1)
    permitted = rng.random((50, VOCABULARY)) < 0.3
    permitted[:, 7] = True
    want = [min(np.flatnonzero(p), key=lambda i: (-row[i], i)) for row, p in zip(logits, permitted, strict=True)]
    np.testing.assert_array_equal(draw(logits, permitted, temperature=0.0), want)


def test_every_sample_is_permitted_and_in_the_nucleus(rng):
    logits = rng.standard_normal((400, VOCABULARY)) * 3
    permitted = rng.random((400, VOCABULARY)) < 0.4
    permitted[:, 3] = True
    drawn = draw(logits, permitted, temperature=0.7, top_p=0.6)
    for row, allowed, token in zip(logits, permitted, drawn, strict=True):
        assert allowed[token]
        p = np.where(allowed, np.exp((row - row[allowed].max()) / 0.7), 0)
        p /= p.sum()
        assert p[p > p[token]].sum() < 0.6 + 1e-6, "a token outside the smallest set that reaches top_p"


def test_frequencies_follow_the_distribution():
    logits = np.full((4000, VOCABULARY), -50.0)
    logits[:, :3] = np.log([0.5, 0.3, 0.2])
    drawn = draw(logits, np.ones((4000, VOCABULARY), bool))
    np.testing.assert_allclose(np.bincount(drawn, minlength=3)[:3] / 4000, [0.5, 0.3, 0.2], atol=0.03)
    cold = draw(logits, np.ones((4000, VOCABULARY), bool), temperature=0.25)
    assert (cold == 0).mean() > 0.8


def test_a_tiny_nucleus_is_greedy(rng):
    logits = rng.standard_normal((60, VOCABULARY))
    everything = np.ones((60, VOCABULARY), bool)
    np.testing.assert_array_equal(draw(logits, everything, top_p=1e-6), logits.argmax(1))


def test_a_row_draws_the_same_alone_and_in_a_batch(rng):
    logits = rng.standard_normal((8, VOCABULARY))
    everything = np.ones((8, VOCABULARY), bool)
    seeds = rng.integers(0, 2**32, 8)
    together = draw(logits, everything, seeds=seeds, index=5)
    alone = [draw(logits[i : i + 1], everything[:1], seeds=seeds[i : i + 1], index=5)[0] for i in range(8)]
    np.testing.assert_array_equal(together, alone)
    assert (together != draw(logits, everything, seeds=seeds, index=6)).any(), "each token has its own key"
