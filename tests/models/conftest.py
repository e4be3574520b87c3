"""Tiny random checkpoints, written as Hugging Face writes them."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
VOCAB = 320  # 258 tokens and padding


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with every byte, <s> = 256 and </s> = 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """A folder that holds the tokenizer alone."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return folder


@pytest.fixture
def save_llama(tmp_path):
    """``save_llama(**changes) -> (folder, transformers model)``; ``shard`` is the shard size in bytes."""

    def save(shard: int | None = None, **changes):
        torch.manual_seed(0)
        shape = {
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "eos_token_id": 257,
            "initializer_range": 0.2,
        }
        model = LlamaForCausalLM(LlamaConfig(**(shape | changes))).eval()
        with torch.no_grad():  # norms start at one and biases at zero, which would hide a wrong name
            for name, value in model.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    value.add_(0.3 * torch.randn_like(value))
        folder = tmp_path / "tiny"
        model.save_pretrained(folder, **({} if shard is None else {"max_shard_size": shard}))
        save_tokenizer(folder)
        return folder, model

    return save


@pytest.fixture
def edit_config():
    """``edit_config(folder, name=value, ...)`` changes config.json; None removes a field."""

    def edit(folder: Path, **changes) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))

    return edit
