"""Generation: requests in, function calls and what was kept out."""

from jaxkv.engine.engine import Engine, generate
from jaxkv.engine.request import Request
from jaxkv.engine.result import GenerationResult, TokenRecord

__all__ = ["Engine", "GenerationResult", "Request", "TokenRecord", "generate"]
