"""Hold jaxkv against transformers on PyTorch: same checkpoint, same BFCL prompts, float32, greedy, no grammar.

    python scripts/compare_torch.py --model smollm2-135m --check 'greedy_match >= 0.99' --json figures.json

Figures: max_logit_difference (all prompt positions, and the tokens that transformers generates, fed one by one to the
engine's decode step); layer_<i>.hidden_difference (after layer i, largest over the prompts; layer_0 is the embedding)
and max_relative_hidden_difference (over the layer's largest value); greedy_match (share of equal tokens);
decode_ms_b<rows>, transformers_decode_ms_b<rows> (median seconds of one decode step, in ms) and
decode_speed_ratio_b<rows> (transformers' time over jaxkv's, above 1 when jaxkv is faster). Steps of the two libraries
alternate in one run. Exit code 0; 1 when a check does not hold (the last line names its figure); 2 for a bad input.
"""

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import tyro
from rich.progress import track

from jaxkv.errors import EvaluationError, ModelError, RequestError
from jaxkv.evaluation import bfcl
from jaxkv.evaluation.figures import Figure, finish, output_console, parse_checks, run_record, run_script

BATCHES = (1, 8)
SETTLE = 0.005  # both libraries' threads spin for a while after their last task


@dataclasses.dataclass(frozen=True)
class Arguments:
    model: str = "smollm2-135m"
    """Model name or Hugging Face folder."""
    prompts: int = 8
    """Prompts, spread over the category."""
    category: str = "simple_python"
    """BFCL category of the prompts."""
    forced_tokens: int = 32
    """Generated tokens whose logits are compared."""
    max_new_tokens: int = 64
    """Greedy tokens that are compared, and decode steps that are timed."""
    rounds: int = 2
    """Timed generations at each batch size, after one that warms up."""
    threads: int = 2
    """CPU threads of each library; the process is confined to as many cores. 0 leaves all."""
    json: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the figures as JSON; - is standard output, alone."""
    check: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="EXPRESSION")] = ()
    """A bound on a figure, such as 'max_logit_difference <= 1e-3'; repeatable."""
    run_json: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write versions, configuration and figures."""


def main(arguments: Arguments) -> int:
    for name, least in (("prompts", 1), ("forced_tokens", 1), ("max_new_tokens", 2), ("rounds", 1), ("threads", 0)):
        if getattr(arguments, name) < least:
            option = name.replace("_", "-")
            raise RequestError(f"--{option} {getattr(arguments, name)} is below {least}; give at least {least}")
    checks = parse_checks(arguments.check)
    bfcl.check_selection([arguments.category])
    confine(arguments.threads)
    console = output_console(arguments.json)

    from jaxkv.models import load_model

    model = load_model(arguments.model, dtype="float32")
    known = figure_names(model.config.num_layers)
    parse_checks(arguments.check, known)
    stride = max(1, len(bfcl.load(arguments.category)) // arguments.prompts)
    cases = bfcl.load(arguments.category, limit=arguments.prompts, stride=stride)
    prompts = [model.tokenizer.apply_chat_template(case.messages) for case in cases]
    for case, prompt in zip(cases, prompts, strict=True):
        if len(prompt) + arguments.max_new_tokens + arguments.forced_tokens > model.config.context:
            raise ModelError(
                f"prompt {case.id} of {len(prompt):,} tokens exceeds the context of {model.config.context:,}"
            )

    from jaxkv.evaluation.torch_reference import load_reference

    reference = Reference(load_reference(arguments.model), model.tokenizer.stop_ids, arguments.threads)
    answers = [
        reference.greedy(prompt, max(arguments.max_new_tokens, arguments.forced_tokens))
        for prompt in track(prompts, "transformers, greedy", console=output_console("-"))
    ]
    figures = dict.fromkeys(known)
    figures |= compare_numbers(model, reference, prompts, [answer[: arguments.forced_tokens] for answer in answers])
    expected = [answer[: arguments.max_new_tokens] for answer in answers]
    figures["greedy_match"] = greedy_match(model, prompts, expected, arguments.max_new_tokens)
    for rows in BATCHES:
        figures |= compare_speed(model, reference, prompts, rows, arguments)
    if arguments.json == "-":
        for name, value in figures.items():
            console.print(f"{name} = {value:.6g}" if isinstance(value, float) else f"{name} = {value}")
    if arguments.run_json is not None:
        run_record(arguments.run_json, arguments, figures)
    return finish(figures, arguments.json, checks)


def figure_names(layers: int) -> list[str]:
    """The figures in the order in which they are printed."""
    speed = [
        f"{name}_b{rows}" for rows in BATCHES for name in ("decode_ms", "transformers_decode_ms", "decode_speed_ratio")
    ]
    hidden = [f"layer_{i}.hidden_difference" for i in range(layers + 1)]
    return ["max_logit_difference", "greedy_match", *speed, "max_relative_hidden_difference", *hidden]


def confine(threads: int) -> None:
    """Let the process run on `threads` cores; XLA sizes its thread pool by them. JAX must not have started yet."""
    if threads and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


class Reference:
    """The transformers model with its own cache."""

    def __init__(self, model: Any, stop_ids: Sequence[int], threads: int):
        import torch

        if threads:
            torch.set_num_threads(threads)
        self.torch, self.model, self.stop_ids = torch, model, stop_ids

    def full(self, tokens: Sequence[int]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Logits [T, V] and the hidden states [T, I] of the embedding and after each layer."""
        last: list[Any] = []
        # transformers applies the final norm to the last hidden state that it returns.
        hook = self.model.model.layers[-1].register_forward_hook(lambda _, __, out: last.append(out))
        try:
            with self.torch.inference_mode():
                out = self.model(self.torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
        finally:
            hook.remove()
        return out.logits[0].numpy(), [hidden[0].numpy() for hidden in (*out.hidden_states[:-1], *last)]

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Any, Any]:
        """The next token [B, 1] of prompts of equal length, and the cache."""
        with self.torch.inference_mode():
            out = self.model(self.torch.tensor([list(p) for p in prompts]), use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True), out.cache

    def step(self, tokens: Any, cache: Any) -> Any:
        """One greedy decode step; the cache grows in place."""
        with self.torch.inference_mode():
            out = self.model(tokens, cache=cache, use_cache=True)
            return out.logits[:, -1].argmax(-1, keepdim=True)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """At most `count` greedy tokens, the stop token left out."""
        answer: list[int] = []
        token, cache = self.prefill([prompt])
        while len(answer) < count and int(token) not in self.stop_ids:
            answer.append(int(token))
            token = self.step(token, cache)
        return answer


def compare_numbers(
    model: Any, reference: Reference, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> dict[str, Figure]:
    """Largest differences of logits and hidden states, over prompts and teacher-forced tokens."""
    hidden = np.zeros(model.config.num_layers + 1)
    logit = relative = 0.0
    pairs = list(zip(prompts, answers, strict=True))
    for prompt, answer in track(pairs, "logits and hidden states", console=output_console("-")):
        expected_logits, expected_hidden = reference.full([*prompt, *answer])
        logits, states = full_pass(model, prompt)
        n = len(prompt)
        decoded = forced_decode(model, prompt, answer)
        logit = max(
            logit,
            np.abs(logits - expected_logits[:n]).max(),
            np.abs(decoded - expected_logits[n - 1 :]).max(),
        )
        for i, (ours, theirs) in enumerate(zip(states, expected_hidden, strict=True)):
            difference = np.abs(ours - theirs[:n]).max()
            hidden[i] = max(hidden[i], difference)
            relative = max(relative, difference / np.abs(theirs[:n]).max())
    named = {f"layer_{i}.hidden_difference": float(value) for i, value in enumerate(hidden)}
    return {"max_logit_difference": float(logit), "max_relative_hidden_difference": float(relative)} | named


def full_pass(model: Any, prompt: Sequence[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits [T, V] of a prompt and the hidden states [T, I] of the embedding and after each layer."""
    from jaxkv.state.kv_state import pad_capacity

    # Padding follows the prompt, where causal attention does not see it.
    tokens = np.zeros((1, pad_capacity(len(prompt))), np.int32)
    tokens[0, : len(prompt)] = prompt
    logits, states = capturing_pass(model)(model.params, tokens)
    return np.asarray(logits[0, : len(prompt)]), [np.asarray(state[0, : len(prompt)]) for state in states]


@functools.cache
def capturing_pass(model: Any) -> Any:
    """The jitted plain forward pass that also returns every hidden state."""
    import jax
    import jax.numpy as jnp

    from jaxkv.models.layers import causal_attention

    @jax.jit
    def run(params: Any, tokens: Any) -> tuple[Any, list[Any]]:
        capture: list[Any] = []

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            return causal_attention(q, k, v, scale=model.attention_scale)

        logits = model.forward(params, tokens, jnp.arange(tokens.shape[1])[None], attend, capture=capture)
        return logits, capture

    return run


def forced_decode(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
    """Logits [len(answer) + 1, V] after the prompt and after each token of the answer, by the engine's own programs."""
    import jax.numpy as jnp

    from jaxkv.engine import steps
    from jaxkv.policies.full import FullKV
    from jaxkv.state.kv_state import init_state, pad_capacity
    from jaxkv.state.payload import KVSpec

    config = model.config
    spec = KVSpec(config.num_layers, config.num_kv_heads, config.head_dim)
    policy = FullKV().bind(spec, config.context, model.fingerprint)
    # A round capacity, so that prompts of about the same length share one compiled program.
    slots = pad_capacity(len(prompt) + len(answer)) + 64
    state = init_state(
        spec, rows=1, window=policy.window, sinks=policy.sinks, high_slots=slots, low_slots=0, dtype=config.dtype
    )
    padded = pad_capacity(len(prompt))
    tokens = np.zeros((1, padded), np.int32)
    tokens[0, : len(prompt)] = prompt
    actions = np.zeros((padded, len(policy.groups)), np.int8)
    actions[: len(prompt)] = policy.plan_prompt(len(prompt))
    first, k, v = steps.prompt_pass(model, model.params, tokens, np.asarray([len(prompt)], np.int32), config.dtype)
    state, logits = steps.admit(state, jnp.zeros_like(first), 0, k, v, actions, len(prompt), first)
    collected = [np.asarray(logits[0])]
    for token in answer:
        one = np.asarray([token], np.int32)
        logits, state = steps.forward(model, model.params, state, one, np.ones(1, bool))
        collected.append(np.asarray(logits[0]))
    return np.stack(collected)


def greedy_match(
    model: Any, prompts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]], max_new_tokens: int
) -> float:
    """Share of positions at which the engine under Full KV and transformers generate the same token."""
    from jaxkv.engine import Engine, Request
    from jaxkv.policies.full import FullKV

    engine = Engine(model, FullKV(), rows=1)
    requests = [
        Request(request_id=str(i), prompt_ids=prompt, max_new_tokens=max_new_tokens) for i, prompt in enumerate(prompts)
    ]
    equal = total = 0
    for result in track(engine.run(requests), "jaxkv, greedy", total=len(prompts), console=output_console("-")):
        if result.error is not None:
            raise EvaluationError(f"prompt {result.request_id} failed: {result.error}")
        theirs = expected[int(result.request_id)]
        equal += sum(a == b for a, b in zip(result.token_ids, theirs, strict=False))
        total += max(len(result.token_ids), len(theirs))
    return equal / max(total, 1)


def compare_speed(
    model: Any, reference: Reference, prompts: Sequence[Sequence[int]], rows: int, arguments: Arguments
) -> dict[str, Figure]:
    """Median time of a decode step of each library, their steps alternating.

    All rows have prompts of one length, so that neither library pays for padding. transformers' step runs inside the
    engine's token callback, when the device is idle, and its time is taken off the engine's.
    """
    from jaxkv.engine import Engine, Request
    from jaxkv.policies.full import FullKV

    chosen = [prompts[i % len(prompts)] for i in range(rows)]
    length = min(map(len, chosen))
    chosen = [list(prompt[-length:]) for prompt in chosen]
    engine = Engine(model, FullKV(), rows=rows)
    ours: list[float] = []
    theirs: list[float] = []
    for number in track(range(arguments.rounds + 1), f"decode speed, {rows} rows", console=output_console("-")):
        token, cache = reference.prefill(chosen)
        taken: dict[int, float] = {}
        times: list[float] = []
        engine.step_seconds.clear()

        def on_token(request_id: str, record: Any) -> None:
            nonlocal token
            step = len(engine.step_seconds)
            if step in taken:  # noqa: B023 (called within this round only)
                return
            outside = time.perf_counter()
            time.sleep(SETTLE)
            started = time.perf_counter()
            token = reference.step(token, cache)  # noqa: B023
            token.tolist()
            times.append(time.perf_counter() - started)  # noqa: B023
            time.sleep(SETTLE)
            taken[step] = time.perf_counter() - outside  # noqa: B023

        requests = [
            Request(request_id=str(i), prompt_ids=prompt, max_new_tokens=arguments.max_new_tokens)
            for i, prompt in enumerate(chosen)
        ]
        for result in engine.run(requests, on_token):
            if result.error is not None:
                raise EvaluationError(f"row {result.request_id} failed: {result.error}")
        if number:  # the first round compiles and warms up
            # A step without a callback fed no token before it; it is not a whole step.
            ours += [seconds - taken[i] for i, seconds in enumerate(engine.step_seconds) if i in taken]
            theirs += times
    if not ours:
        raise EvaluationError("the model stopped at once, no decode step could be timed; choose another --category")
    mine, other = float(np.median(ours)), float(np.median(theirs))
    return {
        f"decode_ms_b{rows}": 1e3 * mine,
        f"transformers_decode_ms_b{rows}": 1e3 * other,
        f"decode_speed_ratio_b{rows}": other / mine,
    }


def cli(arguments: Sequence[str] | None = None) -> int:
    """Run the script with these command-line arguments, by default the process's; gives the exit code."""
    parsed = tyro.cli(Arguments, description=__doc__, args=arguments)
    return run_script(lambda: main(parsed))


if __name__ == "__main__":
    sys.exit(cli())
