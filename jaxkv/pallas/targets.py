"""Devices that kernels are lowered and compiled for where there is none of them.

Source of the CUDA figures: NVIDIA's data sheets, and the per-architecture limits of the CUDA C++ Programming Guide
(section "Technical Specifications per Compute Capability").
"""

import dataclasses
from typing import Any, Final

from jaxkv.errors import KernelError


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What XLA's compiler asks about an NVIDIA GPU; memory in bytes, bandwidth in bytes per second.

    `shared_per_block` is the most that one thread block can have (the opt-in limit): a kernel that asks for more does
    not compile. The rest steers XLA's own fusions, not our kernels.
    """

    capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    threads_per_core: int
    shared_per_block: int
    shared_per_core: int
    l2: int
    memory: int
    bandwidth: int
    clock_ghz: float


@dataclasses.dataclass(frozen=True)
class Target:
    """A device to lower for; `gpu` is given where kernels can also be compiled for it.

    `platform` is the one that `lowering_platforms` takes; `device_kind` is what JAX would call the device, and with it
    `jaxkv.pallas.configs` finds the block sizes.
    """

    name: str
    platform: str
    device_kind: str
    gpu: Gpu | None = None

    def abstract_device(self) -> dict[str, Any]:
        """Arguments of `jax.sharding.AbstractDevice`, which calls CUDA and ROCm alike "gpu"."""
        platform = "gpu" if self.platform in ("cuda", "rocm") else self.platform
        return {"device_kind": self.device_kind, "num_cores": None, "platform": platform}

    def description(self) -> str:
        """The target as the text of XLA's `GpuTargetConfigProto`.

        Raises:
          KernelError: XLA compiles for this target only where such a device is present.
        """
        if self.gpu is None:
            compiled = ", ".join(name for name, target in TARGETS.items() if target.gpu is not None)
            raise KernelError(f"{self.name} can be lowered for and not compiled for here; compile for {compiled}")
        gpu, (major, minor) = self.gpu, self.gpu.capability
        return f"""
          platform_name: "CUDA"
          device_description_str: "{self.device_kind}"
          dnn_version_info {{ major: 9 minor: 10 }}
          runtime_version {{ major: 12 minor: 9 }}
          gpu_device_info {{
            cuda_compute_capability {{ major: {major} minor: {minor} }}
            core_count: {gpu.cores} fpus_per_core: {gpu.fpus_per_core} clock_rate_ghz: {gpu.clock_ghz}
            threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: {gpu.threads_per_core}
            registers_per_core_limit: 65536 registers_per_block_limit: 65536
            shared_memory_per_block: 49152 shared_memory_per_block_optin: {gpu.shared_per_block}
            shared_memory_per_core: {gpu.shared_per_core} l2_cache_size: {gpu.l2}
            device_memory_size: {gpu.memory} memory_bandwidth: {gpu.bandwidth}
            block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          }}"""


_A100 = Gpu(
    capability=(8, 0),
    cores=108,
    fpus_per_core=64,
    threads_per_core=2048,
    shared_per_block=163 << 10,
    shared_per_core=164 << 10,
    l2=40 << 20,
    memory=80 << 30,
    bandwidth=2_039_000_000_000,
    clock_ghz=1.41,
)
_L40S = Gpu(
    capability=(8, 9),
    cores=142,
    fpus_per_core=128,
    threads_per_core=1536,
    shared_per_block=99 << 10,
    shared_per_core=100 << 10,
    l2=96 << 20,
    memory=48 << 30,
    bandwidth=864_000_000_000,
    clock_ghz=2.52,
)
_H100 = Gpu(
    capability=(9, 0),
    cores=132,
    fpus_per_core=128,
    threads_per_core=2048,
    shared_per_block=227 << 10,
    shared_per_core=228 << 10,
    l2=50 << 20,
    memory=80 << 30,
    bandwidth=3_352_000_000_000,
    clock_ghz=1.98,
)

TARGETS: Final = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", "NVIDIA A100-SXM4-80GB", _A100),
        # JAX 0.11 and later know the L40S only when they see one, and the L40 always.
        Target("sm_89", "cuda", "NVIDIA L40", _L40S),
        Target("sm_90", "cuda", "NVIDIA H100 80GB HBM3", _H100),
        Target("gfx942", "rocm", "gfx942"),
        Target("tpu", "tpu", "TPU v5 lite"),
        Target("cpu", "cpu", "cpu"),
    )
}
COMPILED: Final = tuple(name for name, target in TARGETS.items() if target.gpu is not None)
"""Targets that kernels can be compiled for."""


def target_named(name: str) -> Target:
    """The target of that name; raises `KernelError` for an unknown one."""
    if name not in TARGETS:
        raise KernelError(f"no target is named '{name}'; choose one of {', '.join(TARGETS)}")
    return TARGETS[name]
