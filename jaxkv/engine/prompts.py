"""Prompts that ran before, on disk: last logits, keys and values, for every later request with the same tokens."""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.errors import CacheError

PromptResult = tuple[Any, tuple[Any, ...], tuple[Any, ...]]
"""Logits float32 [1, V]; every layer's keys and values [T, K, D], padded."""


class PromptCache:
    """Prompt passes of one model in a folder, one file a prompt, written whole or not at all.

    A file holds 2 L n K D values of `kv_dtype` (SmolLM2-135M in float32: 46 kB a token). Nothing is ever removed; the
    folder can be. Files of another model, dtype or prompt have other names.

    Args:
      folder: made when needed.
      fingerprint: the model's.
      kv_dtype: what keys and values are stored in: float32, or another dtype that NumPy knows.
    """

    def __init__(self, folder: str | Path, fingerprint: str, kv_dtype: str):
        self.folder = Path(folder)
        self._key = f"{fingerprint} {kv_dtype}"
        try:
            np.dtype(kv_dtype)
        except TypeError:
            raise CacheError(
                f"prompts in {kv_dtype} cannot be kept in files; use kv_dtype float32 or float16, or no prompt cache"
            ) from None

    def get(self, prompt: Sequence[int], padded: int) -> PromptResult | None:
        """What `put` was given for these tokens, K and V padded with zeros to `padded` tokens; None if nothing was."""
        path = self._path(prompt)
        try:
            with np.load(path) as file:
                logits, kv = file["logits"], file["kv"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError) as error:
            raise CacheError(f"{path} cannot be read ({error}); remove it, and its prompt runs anew") from error
        wide = np.zeros((2, kv.shape[1], padded, *kv.shape[3:]), kv.dtype)
        wide[:, :, : len(prompt)] = kv
        return logits, tuple(wide[0]), tuple(wide[1])

    def put(self, prompt: Sequence[int], logits: Any, k: Sequence[Any], v: Sequence[Any]) -> None:
        """Keep a prompt pass: logits [1, V], keys and values [T, K, D] of every layer, T >= the prompt's tokens."""
        n = len(prompt)
        kv = np.stack([np.stack([np.asarray(x)[:n] for x in part]) for part in (k, v)])
        path = self._path(prompt)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".partial")
            with os.fdopen(handle, "wb") as stream:
                np.savez(stream, logits=np.asarray(logits), kv=kv)
            os.replace(partial, path)
        except OSError as error:
            raise CacheError(f"cannot write {path}: {error.strerror}; choose another folder or make room") from error

    def _path(self, prompt: Sequence[int]) -> Path:
        digest = hashlib.sha256(f"{self._key} {' '.join(map(str, prompt))}".encode()).hexdigest()
        return self.folder / f"{digest[:40]}.npz"
