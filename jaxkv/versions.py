"""Versions of what decides a result."""

import platform
from importlib import metadata
from typing import Final

RECORDED_PACKAGES: Final = ("jaxkv", "jax", "jaxlib", "flax", "xgrammar", "transformers", "numpy", "torch")


def versions() -> dict[str, str]:
    """Versions of Python and of the recorded packages; absent packages are left out."""
    found = {"python": platform.python_version()}
    for package in RECORDED_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
