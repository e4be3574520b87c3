"""Runtime-D: how much an attention output moves when a bucket is released or quantised (PASK §3.4, Eq. 7).

Reference queries, keys and values stay as they are; only the attention of each layer is computed anew. A query at
position p sees a bucket's entry changed once the entry has left the recent window, position < p - W; prompt entries
among the sinks and the prompt's last W tokens never change. Decode and prompt buckets are measured in one pass over
the answer, whose queries are the only ones that read a compressed cache.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from calibration.bench import Bench
from calibration.interventions import Stage, Trajectory
from jaxkv.evaluation.journal import Journal
from jaxkv.grammar.prompt_labels import PROMPT_LABELS
from jaxkv.ops.quantize import dequantize, quantize
from jaxkv.state.kv_state import pad_capacity


def attention_change(
    q: Float[Array, "U H D"],
    k: Float[Array, "S K D"],
    v: Float[Array, "S K D"],
    visible: Bool[Array, "U S"],
    changed: Bool[Array, "M U S"],
    scale: float,
) -> Float[Array, "M 2"]:
    """The inner part of Eq. 7 for one layer and M buckets: sum over queries of the largest squared change of a head.

    Args:
      q, k, v: of one layer, float32; query head h reads KV head h // (H / K).
      visible: entries that each query sees.
      changed: those of them that an intervention on bucket m changes for each query.

    Returns:
      For the actions R and L, sum over u of max over h of ||o_ref - o'||^2. A query all of whose entries are released
      has the output zero.
    """
    queries, heads, width = q.shape
    kv_heads = k.shape[1]
    grouped = (q * scale).reshape(queries, kv_heads, heads // kv_heads, width)
    low_k, low_v = (dequantize(*quantize(x), width) for x in (k, v))
    exact = lax.Precision.HIGHEST

    def scores(keys: Array) -> Array:
        return jnp.einsum("ukgd,skd->kgus", grouped, keys, precision=exact)

    seen = visible[None, None]
    full, low = scores(k), scores(low_k)
    highest = jnp.max(jnp.where(seen, jnp.maximum(full, low), -jnp.inf), axis=-1, keepdims=True)
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    p = jnp.where(seen, jnp.exp(full - highest), 0.0)
    p_low = jnp.where(seen, jnp.exp(low - highest), 0.0)

    def weigh(weights: Array, values: Array) -> tuple[Array, Array]:
        return weights.sum(-1), jnp.einsum("kgus,skd->kgud", weights, values, precision=exact)

    def output(mass: Array, value: Array) -> Array:
        return jnp.where(mass[..., None] > 0, value / jnp.where(mass > 0, mass, 1.0)[..., None], 0.0)

    reference = output(*weigh(p, v))

    def one(bucket: Array) -> Array:
        inside = bucket[None, None]
        mass, value = weigh(jnp.where(inside, 0.0, p), v)
        low_mass, low_value = weigh(jnp.where(inside, p_low, 0.0), low_v)
        affected = (bucket & visible).any(-1)
        changes = []
        for changed_output in (output(mass, value), output(mass + low_mass, value + low_value)):
            distance = jnp.sum((reference - changed_output) ** 2, axis=-1).max(axis=(0, 1))
            changes.append(jnp.where(affected, distance, 0.0).sum())
        return jnp.stack(changes)

    return lax.map(one, changed)


@functools.partial(jax.jit, static_argnames=("model", "window", "sinks"))
def answer_pass(
    model: Any,
    params: Any,
    tokens: Int[Array, "1 T"],
    length: Int[Array, ""],
    k: tuple[Array, ...],
    v: tuple[Array, ...],
    prompt_length: Int[Array, ""],
    answer_member: Bool[Array, "A T"],
    prompt_member: Bool[Array, "P N"],
    window: int,
    sinks: int,
) -> Float[Array, "L M 2"]:
    """`attention_change` of every layer over one answer, buckets of the answer first, then those of the prompt.

    Args:
      tokens, length: the padded answer and its tokens.
      k, v: every layer's keys and values of the padded prompt [N, K, D], and `prompt_length` of them.
      answer_member, prompt_member: which tokens each bucket holds alone.
    """
    padded, steps = k[0].shape[0], tokens.shape[1]
    answer_position = prompt_length + jnp.arange(steps)
    position = jnp.concatenate([jnp.arange(padded), answer_position])
    real = jnp.concatenate([jnp.arange(padded) < prompt_length, jnp.arange(steps) < length])
    visible = real[None] & (position[None] <= answer_position[:, None]) & (jnp.arange(steps) < length)[:, None]
    eligible = visible & (position[None] < answer_position[:, None] - window) & (position >= sinks)[None]
    in_prompt = jnp.arange(padded + steps) < padded
    eligible &= ~(in_prompt & (position >= prompt_length - window))[None]
    member = jnp.concatenate(
        [
            jnp.pad(answer_member, [(0, 0), (padded, 0)]),
            jnp.pad(prompt_member, [(0, 0), (0, steps)]),
        ]
    )
    changed = member[:, None] & eligible[None]
    found = []

    def attend(layer: int, q: Array, new_k: Array, new_v: Array) -> Array:
        keys = jnp.concatenate([k[layer], new_k[0]]).astype(jnp.float32)
        values = jnp.concatenate([v[layer], new_v[0]]).astype(jnp.float32)
        queries = q[0].astype(jnp.float32)
        found.append(attention_change(queries, keys, values, visible, changed, model.attention_scale))
        return jax.nn.dot_product_attention(
            q, keys[None].astype(q.dtype), values[None].astype(q.dtype), mask=visible[None, None],
            scale=model.attention_scale,
        )  # fmt: skip

    model.forward(params, tokens, answer_position[None], attend, select=jnp.zeros(1, jnp.int32))
    return jnp.stack(found)


def case_distortion(
    bench: Bench, one: Trajectory, decode_keys: int, window: int, sinks: int
) -> dict[Stage, Float[np.ndarray, "Q C 2"]]:
    """Eq. 7's sum for one request, by stage, key, layer group and action (R, L)."""
    length, prompt = len(one.token_ids), list(one.prompt_ids)
    steps, padded = pad_capacity(length), pad_capacity(len(prompt))
    tokens = np.zeros((1, steps), np.int32)
    tokens[0, :length] = one.token_ids
    answer_member, prompt_member = members(one, decode_keys)
    found = bench.prompts.get(prompt, padded)
    assert found is not None, "the reference run has put every prompt there"
    _, k, v = found
    result = np.asarray(
        answer_pass(
            bench.model,
            bench.model.params,
            tokens,
            np.int32(length),
            k,
            v,
            np.int32(len(prompt)),
            np.pad(answer_member, [(0, 0), (0, steps - length)]),
            np.pad(prompt_member, [(0, 0), (0, padded - len(prompt))]),
            window,
            sinks,
        ),
        np.float64,
    )
    groups = [result[start:stop].sum(axis=0) for start, stop in bench.spec.groups]
    both = np.stack(groups, axis=1)  # [M, C, 2]
    return {"decode": both[:decode_keys], "prompt": both[decode_keys:]}


def members(one: Trajectory, decode_keys: int) -> tuple[Bool[np.ndarray, "A T"], Bool[np.ndarray, "P N"]]:
    """Which tokens of the answer and of the prompt belong to one key alone: the ones that an intervention changes."""
    answer = np.zeros((decode_keys, len(one.token_ids)), bool)
    for t, keys in enumerate(one.keys):
        if len(keys) == 1:
            answer[keys[0], t] = True
    prompt = np.zeros((len(PROMPT_LABELS), len(one.labels)), bool)
    for i, labels in enumerate(one.labels):
        if len(labels) == 1:
            prompt[labels[0], i] = True
    return answer, prompt


def measure(
    bench: Bench,
    trajectories: Sequence[Trajectory],
    decode_keys: int,
    path: Path,
    config: dict[str, Any],
    on_case: Callable[[int], None],
) -> dict[Stage, Float[np.ndarray, "Q C 2"]]:
    """D(q, a) of Eq. 7, the mean over the requests; each request is kept in a journal as it finishes."""
    window, sinks = bench.like.window, bench.like.sinks
    with Journal(path, config) as journal:
        for one in trajectories:
            if one.id not in journal.finished:
                found = case_distortion(bench, one, decode_keys, window, sinks)
                journal.add({"id": one.id, **{stage: found[stage].tolist() for stage in found}})
                on_case(len(one.token_ids))
            else:
                on_case(0)
        total = {
            stage: sum(np.array(journal.finished[one.id][stage], np.float64) for one in trajectories)
            for stage in ("decode", "prompt")
        }
    return {stage: np.asarray(value) / len(trajectories) for stage, value in total.items()}  # type: ignore[misc]
