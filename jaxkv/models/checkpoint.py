"""Tensors of a checkpoint by their Hugging Face names, described before they are read.

``Checkpoint.tensors`` gives shape and a reader per tensor, so that names and shapes are checked against the model
before any weight is touched. Safetensors files are memory-mapped; nothing is unpickled.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxkv.errors import ModelError

_FLOATS = {"F32", "F16", "BF16"}
_SAMPLE = 4096


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint: its shape, and ``read()`` which returns it as a floating-point array."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """``config`` as in ``config.json``, ``tensors`` by Hugging Face name, ``where`` for messages."""

    config: dict
    tensors: Mapping[str, Tensor]
    where: str


def read_json(path: Path) -> dict:
    """A JSON object from a file, or a ModelError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; a model folder needs {path.name}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} is not readable JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not a JSON object; fetch it again")
    return value


def read_folder(folder: Path) -> Checkpoint:
    """Describes a Hugging Face folder: ``config.json``, and ``model.safetensors``, its shards or any ``*.safetensors``.

    Raises ModelError for missing, truncated or duplicated pieces, naming them.
    """
    config = read_json(folder / "config.json")
    tensors: dict[str, Tensor] = {}
    for path in _shards(folder):
        for name, tensor in _safetensors(path).items():
            if name in tensors:
                raise ModelError(f"tensor {name} is in more than one safetensors file of {folder}; keep one")
            tensors[name] = tensor
    return Checkpoint(config, tensors, str(folder))


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ModelError(f"{index} has no weight_map from tensor to file; fetch it again")
        names = sorted(set(weight_map.values()))
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise ModelError(f"{index} points outside its folder ({outside[0]}); shards lie beside the index")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{folder} lacks the shards {', '.join(missing)} that its index names; fetch them")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        other = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        hint = f"; {other[0]} is a pickle, which is never loaded: convert it to safetensors" if other else ""
        raise ModelError(f"{folder} holds no *.safetensors file{hint}")
    return paths


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        handle = safe_open(path, framework="numpy")
        tensors = {}
        for name in handle.keys():  # noqa: SIM118 (a handle is not iterable)
            piece = handle.get_slice(name)
            if piece.get_dtype() not in _FLOATS:
                raise ModelError(f"tensor {name} in {path} is {piece.get_dtype()}; supported are F32, F16 and BF16")
            tensors[name] = Tensor(tuple(piece.get_shape()), lambda name=name: handle.get_tensor(name))
        return tensors
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is truncated or not a safetensors file ({error}); fetch it again") from error


def check_tensors(
    checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], ignored: tuple[str, ...] = ()
) -> None:
    """Compares names and shapes with what the model needs; a ModelError names missing, extra and mis-shaped tensors.

    ``ignored`` are suffixes of tensors that a checkpoint may hold and the model does not need.
    """
    found = {name: tensor for name, tensor in checkpoint.tensors.items() if not name.endswith(ignored)}
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    shapes = [
        f"{name} is {list(found[name].shape)}, not {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    problems = [
        f"{label}: {'; '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
        for label, names in (("missing tensors", missing), ("unexpected tensors", extra), ("wrong shapes", shapes))
        if names
    ]
    if problems:
        raise ModelError(
            f"{checkpoint.where} does not match its config. {'. '.join(problems)}. "
            "Fetch it again or correct config.json"
        )


class Fingerprint:
    """sha256 over the configuration and, per tensor, its name, shape and about 4,096 evenly spaced values in float32.

    The sample is of the checkpoint's values, so the dtype that a model is loaded in does not change it.
    """

    def __init__(self, config: dict):
        self._sha = hashlib.sha256(json.dumps(config, sort_keys=True).encode())

    def add(self, name: str, value: np.ndarray) -> None:
        """Adds one tensor; the order of calls counts."""
        flat = value.reshape(-1)
        sample = flat[:: max(1, flat.size // _SAMPLE)].astype(np.float32)
        self._sha.update(f"{name} {list(value.shape)} ".encode() + sample.tobytes())

    def hexdigest(self) -> str:
        """64 hexadecimal digits."""
        return self._sha.hexdigest()


NUMPY_DTYPES: dict[str, np.dtype] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
