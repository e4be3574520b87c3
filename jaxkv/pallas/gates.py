"""What can be proven about a kernel without its GPU: that it lowers, and what the compiler makes of it.

Lowering (`lower_for`) needs JAX alone and takes a fraction of a second: it refuses primitives and shapes that Triton
does not know. It accepts kernels that the compiler then refuses, and says nothing about registers. Compiling
(`compile_for`) needs JAX's CUDA plugin, takes seconds, and gives the machine code's registers, spills and shared
memory. Neither runs a kernel; its numbers are checked in interpret mode.
"""

import contextlib
import functools
import importlib.metadata
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from jaxkv.errors import KernelError
from jaxkv.pallas.targets import target_named

PREFIX: Final = "jaxkv_"
"""Every kernel's name begins with it."""
_REMEDY: Final = "install jaxkv[aot] with the version of jax that is installed, or run `make aot`"


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel's machine code: registers and bytes spilled (stores and loads) a thread, shared bytes a block."""

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int


def lower_for(fn: Callable[..., Any], operands: tuple[Any, ...], target: str) -> str:
    """The StableHLO text of `fn`, lowered for a target that need not be present.

    Args:
      fn: a function of `operands` that can be jitted; what it traces may depend on the target (`implementation=None`).
      operands: pytrees of arrays or `jax.ShapeDtypeStruct`.
      target: a name in `jaxkv.pallas.targets.TARGETS`.

    Raises:
      KernelError: the target is unknown. What JAX raises where the function does not lower is passed on.
    """
    chosen = target_named(target)
    # JAX 0.11 and later lower a Pallas Triton kernel only when the abstract device says that there is a GPU.
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(**chosen.abstract_device()))):
        # A function of its own: JAX would answer from its cache for another target where only a mesh differs.
        traced = jax.jit(lambda *arguments: fn(*arguments)).trace(*operands)
        return traced.lower(lowering_platforms=(chosen.platform,)).as_text()


def kernels_in(text: str) -> set[str]:
    """Names of our kernels in lowered text."""
    return set(re.findall(rf'name = "({PREFIX}\w+)"', text))


def triton_calls(text: str) -> int:
    """Calls of Triton kernels in lowered text, ours or not."""
    return len(re.findall(r"custom_call @__gpu\$xla\.gpu\.triton|custom_call @triton_kernel_call", text))


@contextlib.contextmanager
def compiling_for(target: str) -> Iterator[Callable[[Any], Any]]:
    """While it lasts, what is lowered is for a CUDA target that need not be present, and can be compiled.

    Gives a function that makes operands (a pytree of arrays or `jax.ShapeDtypeStruct`) abstract ones on that target.

    Raises:
      KernelError: the plugin or ptxas is missing or does not fit jax, or the target cannot be compiled for.
    """
    chosen = target_named(target)
    require_plugin()
    sharding = SingleDeviceSharding(_device(chosen.description()))

    def place(operands: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), operands)

    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(**chosen.abstract_device()))):
        yield place


def compile_for(fn: Callable[..., Any], operands: tuple[Any, ...], target: str) -> tuple[CompiledKernel, ...]:
    """Compile `fn` to machine code for a CUDA target that need not be present, and measure its kernels.

    Shared memory is Triton's dynamic allocation, which XLA writes into its thunk sequence, and what the PTX declares
    besides. Registers and spills are those that `ptxas` reports for the PTX that XLA dumps, with XLA's settings.

    Args:
      fn: a function of `operands` that can be jitted.
      operands: pytrees of arrays or `jax.ShapeDtypeStruct`.
      target: a name in `jaxkv.pallas.targets.COMPILED`.

    Returns:
      What each kernel whose name begins with `PREFIX` came to, in the order in which they run.

    Raises:
      KernelError: the plugin or ptxas is missing or does not fit jax, the target cannot be compiled for, or the
        compiler refuses the function (its words are in the message). What JAX raises while lowering is passed on.
    """
    with compiling_for(target) as place:
        lowered = jax.jit(lambda *arguments: fn(*arguments)).lower(*place(operands))
    with tempfile.TemporaryDirectory(prefix="jaxkv-aot-") as folder:
        try:
            lowered.compile(compiler_options={"xla_dump_to": folder})
        except jax.errors.JaxRuntimeError as error:
            raise KernelError(f"{target}: the compiler refuses it: {_summary(str(error))}") from error
        found = _measure(Path(folder))
    if missing := kernels_in(lowered.as_text()) - {_base(kernel.name) for kernel in found}:
        raise KernelError(
            f"{target}: jax {jax.__version__} compiled {', '.join(sorted(missing))} and left no dump of it; switch the "
            "compilation cache off (JAX_ENABLE_COMPILATION_CACHE=false), or use the jax of the compile baseline"
        )
    return found


def require_plugin() -> None:
    """Raise `KernelError` unless what `compile_for` needs is installed and fits."""
    versions = {}
    for package in ("jax-cuda12-plugin", "jax-cuda12-pjrt"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise KernelError(f"compiling for CUDA needs the package {package}, which is not here; {_REMEDY}") from None
    for package, version in versions.items():
        # A fourth number marks a release of jax alone.
        if version.split(".")[:3] != jax.__version__.split(".")[:3]:
            raise KernelError(f"{package} is {version} and jax is {jax.__version__}; {_REMEDY}")
    _ptxas()


@functools.cache
def _ptxas() -> Path:
    try:
        files = importlib.metadata.files("nvidia-cuda-nvcc-cu12") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "ptxas":
            return Path(str(file.locate()))
    raise KernelError(f"the report of registers needs ptxas of the package nvidia-cuda-nvcc-cu12; {_REMEDY}")


@functools.cache
def _device(description: str) -> Any:
    try:
        topology = topologies.get_topology_desc(platform="cuda", target_config=description, topology="1x1x1")
    except Exception as error:
        raise KernelError(
            f"JAX cannot describe a CUDA device without having one: {_summary(str(error))}; set JAX_PLATFORMS=cpu "
            "before JAX starts, so that the plugin does not look for a GPU"
        ) from error
    return topology.devices[0]


def _measure(folder: Path) -> tuple[CompiledKernel, ...]:
    """Our kernels in a dump of XLA's."""
    dynamic: dict[str, int] = {}
    for path in sorted(folder.glob("*.thunk_sequence.txt")):
        for name, size in re.findall(rf"\b({PREFIX}\w+) .*shared_memory: (\d+) bytes", path.read_text()):
            dynamic[name] = int(size)
    reports = {}
    for path in sorted(folder.glob("*.ptx")):
        ptx = path.read_text()
        if not re.search(rf"\.entry {PREFIX}", ptx):
            continue
        architecture = re.search(r"\.target (\w+)", ptx)
        assert architecture is not None, "PTX without a target is not PTX"
        command = [str(_ptxas()), "-v", "--gpu-name", architecture[1], str(path), "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise KernelError(f"ptxas refuses XLA's PTX: {_summary(done.stderr)}; {_REMEDY}")
        reports |= parse_ptxas(done.stderr)
    return tuple(
        CompiledKernel(name, registers, spills, size + static)
        for name, size in dynamic.items()
        if name in reports
        for registers, spills, static in (reports[name],)
    )


def parse_ptxas(report: str) -> dict[str, tuple[int, int, int]]:
    """Registers, spilled bytes (stores and loads) and static shared bytes of each entry in the words of `ptxas -v`."""
    found = {}
    for name, text in re.findall(r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry function|\Z)", report, re.S):
        registers = re.search(r"Used (\d+) registers", text)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
        if registers is None or spills is None:
            raise KernelError(f"ptxas says nothing of the registers of {name}; install nvidia-cuda-nvcc-cu12 12.9")
        static = re.search(r"(\d+) bytes smem", text)
        found[name] = (int(registers[1]), int(spills[1]) + int(spills[2]), int(static[1]) if static else 0)
    return found


def _base(name: str) -> str:
    """XLA numbers the second and later kernels of a name."""
    return re.sub(r"_\d+$", "", name)


def _summary(text: str) -> str:
    """The first line that says something, shortened: XLA appends the whole module to some errors."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else "no reason given")[:400]
