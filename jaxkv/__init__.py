"""jaxkv: structure-aware KV-cache compression for JAX."""

from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "Engine": "jaxkv.engine",
    "FunctionCalls": "jaxkv.grammar.function_calling",
    "GenerationResult": "jaxkv.engine",
    "Request": "jaxkv.engine",
    "SqlQueries": "jaxkv.grammar.sql",
    "attention_mass": "jaxkv.ops.attention_mass",
    "deletion_effect": "jaxkv.ops.deletion_effect",
    "generate": "jaxkv.engine",
    "load_model": "jaxkv.models",
    "load_policy": "jaxkv.policies.registry",
    "mixed_attention": "jaxkv.ops.mixed_attention",
    "quantize": "jaxkv.ops.quantize",
    "tool_messages": "jaxkv.prompting",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    # Lazy: reading a policy file or a tools file must not wait for torch and transformers to be imported.
    if name in _EXPORTS:
        import importlib

        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'jaxkv' has no attribute '{name}'")
