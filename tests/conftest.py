"""Shape and type annotations of the package are checked in tests, and cost nothing in use."""

import os

# One process with two threads is what the figures in the documentation were measured with.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxtyping import install_import_hook

_hook = install_import_hook("jaxkv", "beartype.beartype")
_hook.__enter__()
