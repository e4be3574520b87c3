"""Shape and type annotations of the package are checked in tests, and cost nothing in use."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the suite's time is compilation; unoptimised code has the same numbers and compiles in half the time.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import pytest
from jaxtyping import install_import_hook

PACKAGE = Path(__file__).parent.parent / "jaxkv"
# JAX rebuilds pytrees around placeholders (tracing information, None), which a field check would refuse.
PYTREES = {"jaxkv.ops.layer_kv", "jaxkv.state.kv_state"}

_modules = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
}
_packages = {module.rsplit(".", 1)[0] for module in _modules if module != "jaxkv"}
# Packages are left out because a hooked name covers everything below it.
install_import_hook(sorted(_modules - _packages - PYTREES), "beartype.beartype").__enter__()


@pytest.fixture(scope="session")
def smollm2():
    """The real SmolLM2-135M-Instruct in float32; mark what uses it with ``model``."""
    from jaxkv.models import load_model

    return load_model("smollm2-135m", dtype="float32")
