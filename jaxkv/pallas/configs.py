"""Block sizes of the kernels: frozen, per operation, GPU architecture and head width, stored as JSON beside this file.

`scripts/tune_kernels.py` rewrites them where a GPU is present.
"""

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any, Final

import jax
from jax.experimental import pallas as pl

from jaxkv.errors import KernelError

FOLDER: Final = Path(__file__).parent / "configs"
# Names that JAX gives to devices -> architecture. A real device also tells its compute capability.
_KINDS: Final = (
    (r"A100|A30|A800", "sm_80"),
    (r"L4|L40S?|RTX 40\d\d|RTX 6000 Ada", "sm_89"),
    (r"H100|H200|H20|H800|GH200", "sm_90"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """How one kernel is cut.

    `block_slots`, a power of two, counts the slots (or vectors, or tokens) that a program reads at a time;
    `query_rows`, a power of two, the queries of its tile at most. `num_warps` and `num_stages` are Triton's. `programs`
    decides how far a long cache is split: about two for each multiprocessor keep a GPU's memory busy.
    """

    block_slots: int
    num_warps: int
    num_stages: int
    query_rows: int = 16
    programs: int = 1

    def __post_init__(self) -> None:
        for name in ("block_slots", "query_rows"):
            if (value := getattr(self, name)) < 16 or value & (value - 1):
                raise KernelError(f"{name} = {value}; it is a power of two, 16 or more")
        if self.num_warps not in (1, 2, 4, 8, 16) or self.num_stages < 1 or self.programs < 1:
            raise KernelError(f"{self}: num_warps is 1, 2, 4, 8 or 16, num_stages and programs are at least 1")


def architecture() -> str:
    """The GPU architecture that is compiled for: of the abstract mesh's device if one is set, else of the backend's.

    `sm_90` where there is no GPU (interpret mode).
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return _of_kind(abstract.device_kind)
    device = jax.devices()[0]
    if device.platform != "gpu":
        return "sm_90"
    capability = str(getattr(device, "compute_capability", ""))
    if re.fullmatch(r"\d+\.\d", capability):
        return "sm_" + capability.replace(".", "")
    return _of_kind(device.device_kind)


def _of_kind(kind: str) -> str:
    if found := re.search(r"gfx\w+", kind):
        return found[0]
    return next((name for pattern, name in _KINDS if re.search(pattern, kind)), "sm_90")


@functools.cache
def stored(op: str) -> dict[str, dict[int, Config]]:
    """All configs of an operation: architecture -> head width -> config."""
    table: dict[str, dict[str, Any]] = json.loads((FOLDER / f"{op}.json").read_text())
    return {name: {int(width): Config(**fields) for width, fields in rows.items()} for name, rows in table.items()}


def write(op: str, table: dict[str, dict[int, Config]], folder: Path = FOLDER) -> None:
    """Store all configs of an operation, one line each."""
    blocks = []
    for name, widths in table.items():
        lines = [f'    "{width}": {json.dumps(dataclasses.asdict(config))}' for width, config in widths.items()]
        blocks.append(f'  "{name}": {{\n' + ",\n".join(lines) + "\n  }")
    (folder / f"{op}.json").write_text("{\n" + ",\n".join(blocks) + "\n}\n")
    stored.cache_clear()


def load_config(op: str, head_dim: int, on: str | None = None, dtype: Any = "bfloat16") -> Config:
    """The config of `op` for a head width and a dtype, on architecture `on` or the one that is compiled for.

    Unknown architectures take the newest older one of their family, other head widths the next larger one. Stored are
    the configs of 16-bit operands; float32, whose products are not made by tensor cores and keep both operands in
    registers, takes twice the warps, up to 8: with 4 it spills from head width 96 on.
    """
    table, name = stored(op), on or architecture()
    if name not in table:
        family = name.rstrip("0123456789abcdef")
        kin = sorted((known for known in table if known.startswith(family)), key=_order) or ["sm_90"]
        name = next((known for known in reversed(kin) if _order(known) <= _order(name)), kin[0])
    widths = table[name]
    config = widths[min((width for width in widths if width >= head_dim), default=max(widths))]
    if str(dtype) == "float32":
        return dataclasses.replace(config, num_warps=max(config.num_warps, min(2 * config.num_warps, 8)))
    return config


def _order(name: str) -> int:
    return int(re.sub(r"\D", "", name) or 0)


def splits_for(config: Config, programs: int, slots: int) -> int:
    """Into how many splits a cache of `slots` is cut when `programs` run without splitting."""
    return max(1, min(pl.cdiv(config.programs, programs), pl.cdiv(slots, 2 * config.block_slots)))
