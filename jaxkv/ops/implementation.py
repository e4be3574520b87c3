"""The choice between the implementations of an op: plain XLA, or a Pallas Triton kernel."""

from collections.abc import Callable
from typing import Any, Final

import jax
from jax import lax

from jaxkv.errors import KernelError

IMPLEMENTATIONS: Final = ("xla", "triton", "triton_interpret")


def compiles_for_gpu() -> bool:
    """Whether what is traced now is meant for a GPU: the default backend's, or an abstract device's."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return (abstract.platform if abstract is not None else jax.default_backend()) in ("gpu", "cuda", "rocm")


def run(
    op: str,
    implementation: str | None,
    xla: Callable[..., Any],
    triton: Callable[..., Any],
    obstacle: str | None,
    *operands: Any,
) -> Any:
    """Apply the implementation that is asked for, or the fastest that can run, to `operands` (pytrees of arrays).

    Args:
      op: the op's name, for errors.
      implementation: "xla", "triton", "triton_interpret" (the kernel as XLA operations: its numbers, on any device) or
        None: the kernel when tracing for a GPU, else XLA.
      xla, triton: the implementations; `triton` also takes `interpret`.
      obstacle: why the kernel cannot handle these operands, if it cannot.

    Raises:
      KernelError: the implementation is unknown, or is the kernel, which cannot run here.
    """
    if implementation is None:
        if obstacle is not None or not compiles_for_gpu():
            return xla(*operands)
        return lax.platform_dependent(*operands, cuda=triton, rocm=triton, default=xla)
    if implementation not in IMPLEMENTATIONS:
        raise KernelError(
            f"{op} has no implementation '{implementation}'; choose one of {', '.join(IMPLEMENTATIONS)}, or None"
        )
    if implementation == "xla":
        return xla(*operands)
    if obstacle is not None:
        raise KernelError(f"{op}: implementation '{implementation}' cannot run: {obstacle}; use 'xla' or None")
    if implementation == "triton_interpret":
        return triton(*operands, interpret=True)
    if not compiles_for_gpu():
        raise KernelError(
            f"{op}: implementation 'triton' needs an NVIDIA or AMD GPU and this is {jax.default_backend()}; use None "
            "or 'xla', or 'triton_interpret' to check its numbers"
        )
    return triton(*operands)
