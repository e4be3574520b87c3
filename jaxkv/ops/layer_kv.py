"""What one layer's attention reads: disjoint partitions of its visible tokens, with their absolute positions.

Arrays are head-major, [B, K, S, D]: each KV head's keys are contiguous, so a dot over D or S needs no transposition.
With slots before heads XLA's CPU backend copies the whole cache to transpose it in every step.
"""

import dataclasses

import jax
from jaxtyping import Array, Float, Float16, Int, UInt8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DensePart:
    """Tokens at full precision: the long-range `high` partition, or the `recent` ring.

    Position -1 marks an empty slot.
    """

    k: Float[Array, "B K S D"]
    v: Float[Array, "B K S D"]
    position: Int[Array, "B S"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowPart:
    """Long-range tokens in INT4 (P = ceil(D/2) bytes a vector) with FP16 scales (PASK B.5)."""

    k_codes: UInt8[Array, "B K S P"]
    v_codes: UInt8[Array, "B K S P"]
    k_scale: Float16[Array, "B K S"]
    v_scale: Float16[Array, "B K S"]
    position: Int[Array, "B S"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerKV:
    """The partitions of one layer. Each visible token is in exactly one of them."""

    high: DensePart
    low: LowPart
    recent: DensePart

    def check_heads(self, heads: int) -> None:
        """Raise ValueError unless `heads` query heads share the KV heads evenly."""
        kv_heads = self.recent.k.shape[1]
        if heads % kv_heads:
            raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} KV heads")
