"""The choice between the implementations of an op: plain XLA, or a Pallas kernel."""

from collections.abc import Callable
from typing import Any, Final

import jax
from jax import lax

from jaxkv.errors import KernelError

IMPLEMENTATIONS: Final = ("xla", "triton", "triton_interpret")
MOSAIC_GPU: Final = ("mosaic_gpu", "mosaic_gpu_interpret")


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
    mosaic_gpu: Callable[..., Any] | None = None,
) -> Any:
    """Apply the implementation that is asked for, or the fastest that can run, to `operands` (pytrees of arrays).

    Args:
      op: the op's name, for errors.
      implementation: "xla", "triton", "triton_interpret" (the kernel as XLA operations: its numbers, on any device) or
        None: the kernel when tracing for a GPU, else XLA.
      xla, triton: the implementations; `triton` also takes `interpret`.
      obstacle: why the kernel cannot handle these operands, if it cannot.
      mosaic_gpu: the implementation "mosaic_gpu" and, with `interpret`, "mosaic_gpu_interpret", of an op that has one.
        It is never chosen, and raises what it cannot handle itself.

    Raises:
      KernelError: the implementation is unknown, or is the kernel, which cannot run here.
    """
    if implementation is None:
        if obstacle is not None or not compiles_for_gpu():
            return xla(*operands)
        return lax.platform_dependent(*operands, cuda=triton, rocm=triton, default=xla)
    if mosaic_gpu is not None and implementation in MOSAIC_GPU:
        interpret = implementation == "mosaic_gpu_interpret"
        if not (interpret or compiles_for_gpu()):
            raise KernelError(
                f"{op}: implementation 'mosaic_gpu' needs an NVIDIA Hopper GPU and this is {jax.default_backend()}; "
                "use None or 'xla', or 'mosaic_gpu_interpret' to check its numbers"
            )
        return mosaic_gpu(*operands, interpret=interpret)
    if implementation not in IMPLEMENTATIONS:
        names = IMPLEMENTATIONS if mosaic_gpu is None else IMPLEMENTATIONS + MOSAIC_GPU
        raise KernelError(f"{op} has no implementation '{implementation}'; choose one of {', '.join(names)}, or None")
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
