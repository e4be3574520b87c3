"""Language models as pure functions of parameters, tokens and an attention that the caller supplies."""

from jaxkv.models.layers import causal_attention
from jaxkv.models.llama import Llama, LlamaConfig
from jaxkv.models.loading import Model, load_model
from jaxkv.models.tokenizer import Tokenizer

__all__ = ["Llama", "LlamaConfig", "Model", "Tokenizer", "causal_attention", "load_model"]
