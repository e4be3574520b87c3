"""jaxkv: structure-aware KV-cache compression for JAX."""

__version__ = "0.1.0"
