"""The engine's jitted programs: the prompt pass, the forward step and the choice of the next token.

A decode step is two launches, so that parsing hides behind the device: `forward` starts as soon as the token is
known; while it runs, the host accepts the token, resolves its tags and fills the next mask; then `choose` schedules
the token's action and samples its successor.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8, UInt32

from jaxkv.engine.sampling import sample
from jaxkv.models.layers import causal_attention
from jaxkv.ops.mixed_attention import mixed_attention
from jaxkv.state.kv_state import KVState
from jaxkv.state.transfer import append, decide, fill_row, reset_row


@functools.partial(jax.jit, static_argnames=("model", "kv_dtype"))
def prompt_pass(
    model: Any, params: Any, tokens: Int[Array, "1 T"], length: Int[Array, "1"], kv_dtype: str
) -> tuple[Float[Array, "1 V"], tuple[Array, ...], tuple[Array, ...]]:
    """Full-precision pass over one padded prompt: logits of its last token, and every layer's K and V [T, K, D].

    The K and V are the scratch that `fill_row` keeps, quantises or releases (PASK B.4).
    """
    keys: list[Array] = []
    values: list[Array] = []

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        keys.append(k[0].astype(kv_dtype))
        values.append(v[0].astype(kv_dtype))
        return causal_attention(q, k, v, length, scale=model.attention_scale)

    positions = jnp.arange(tokens.shape[1])[None]
    logits = model.forward(params, tokens, positions, attend, select=length - 1)
    return logits, tuple(keys), tuple(values)


@functools.partial(jax.jit, donate_argnames=("state", "logits"))
def admit(
    state: KVState,
    logits: Float[Array, "B V"],
    row: int | Int[Array, ""],
    k: tuple[Array, ...],
    v: tuple[Array, ...],
    actions: Int8[Array, "T C"],
    length: int | Int[Array, ""],
    prompt_logits: Float[Array, "1 V"],
) -> tuple[KVState, Float[Array, "B V"]]:
    """Put a prompt into a row: its tokens into the partitions, its last logits in line for sampling."""
    return fill_row(state, row, k, v, actions, length), logits.at[row].set(prompt_logits[0])


@functools.partial(jax.jit, static_argnames=("model", "implementation"), donate_argnames=("state",))
def forward(
    model: Any,
    params: Any,
    state: KVState,
    tokens: Int[Array, "B"],
    active: Bool[Array, "B"],
    implementation: str | None = None,
) -> tuple[Float[Array, "B V"], KVState]:
    """One token in each active row: logits of its successor, and the state with the token in the recent window.

    Inactive rows compute garbage that nobody reads, and their state is unchanged.
    """
    position = state.length[:, None]
    keys: list[Array] = []
    values: list[Array] = []

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        keys.append(k[:, 0])
        values.append(v[:, 0])
        return mixed_attention(
            q,
            state.layer(layer),
            jnp.where(active[:, None], position, -1),
            new_kv=(k, v),
            scale=model.attention_scale,
            implementation=implementation,
        )

    logits = model.forward(params, tokens[:, None], position, attend, select=jnp.zeros_like(state.length))
    return logits, append(state, keys, values, active, after=logits[0, 0])


@functools.partial(jax.jit, static_argnames=("policy_step",), donate_argnames=("policy_state", "pending"))
def choose(
    policy_step: Any,
    policy_state: Any,
    pending: Int8[Array, "B W C"],
    length: Int[Array, "B"],
    fault: Int[Array, "B"],
    logits: Float[Array, "B V"],
    words: Int[Array, "B N"],
    tag_ids: Int[Array, "B U"],
    parser_state: Int[Array, "B"],
    fed: Bool[Array, "B"],
    temperature: Float[Array, "B"],
    top_p: Float[Array, "B"],
    seed: UInt32[Array, "B"],
    index: Int[Array, "B"],
) -> tuple[Int[Array, "B N_out"], Any, Int8[Array, "B W C"]]:
    """Schedule the actions of the tokens just fed, and sample their successors.

    `fed` marks rows whose newest token was generated: a row fresh from its prompt has nothing to schedule. Returns
    int32 [B, 2 + C] — the next token, the row's fault code, the actions — in one array, so that one transfer serves
    the host; then the policy's state, and `KVState.pending`.
    """
    actions, policy_state = policy_step(policy_state, tag_ids, parser_state, fed)
    tokens = sample(logits, words, temperature, top_p, seed, index)
    packed = jnp.concatenate([tokens[:, None], fault[:, None], actions.astype(jnp.int32)], axis=1)
    return packed, policy_state, decide(pending, length, actions, fed)


release_row = jax.jit(reset_row, donate_argnums=0)

policy_only = jax.jit(lambda policy_step, *arguments: policy_step(*arguments), static_argnums=0)
"""The policy's step by itself, for profiling."""
