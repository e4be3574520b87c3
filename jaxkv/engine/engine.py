"""The engine: rows of one KV state, filled with requests as they come and go.

Everything here is host code around the jitted programs of `engine.steps`. One decode step fetches the tokens sampled
last, launches their forward pass, follows the grammars while the device works, and launches the next sampling.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkv.engine import steps
from jaxkv.engine.prompts import PromptCache
from jaxkv.engine.request import Request, prompt_of
from jaxkv.engine.result import GenerationResult, TokenRecord
from jaxkv.engine.rows import Row, RowTables, Slots
from jaxkv.errors import JaxkvError, RequestError
from jaxkv.grammar.prompt_labels import label_tokens
from jaxkv.state.kv_state import KVState, allocated_bytes, describe_fault, init_state, pad_capacity
from jaxkv.state.payload import Cost, KVSpec, group_costs, request_cost
from jaxkv.state.transfer import grow

GROWTH = 32
"""Slots that a partition grows by beyond the one that it lacks: a new shape is a compilation."""

OnToken = Callable[[str, TokenRecord], None]


@dataclasses.dataclass
class StepTimes:
    """Seconds of one profiled decode step's parts, each measured with the device idle before and after."""

    forward: float
    grammar: float
    policy: float
    sampling: float


class Engine:
    """Generates for many requests in `rows` rows under one KV policy.

    Args:
      model: from `load_model`.
      policy: from `load_policy`; it is bound to the model here (PolicyError if it was made for another one).
      rows: requests decoded together. A row that finishes takes the next request.
      kv_dtype: storage of full-precision keys and values; by default the model's dtype.
      implementation: attention implementation, see `ops.mixed_attention`.
      profile: time the parts of every decode step (`step_times`); the host then waits where it would run ahead.
      prompts: prompts that ran before; each prompt that is not among them runs once and is added.

    Attributes:
      state: the KV state.
      peak_bytes: largest `allocated_bytes` of the state so far.
      prefill_scratch_bytes: largest full-precision scratch of a prompt pass so far; it exists beside the state.
      step_seconds: wall time of every decode step that admitted no request.
      step_times: with `profile`, a `StepTimes` a step.
    """

    def __init__(
        self,
        model: Any,
        policy: Any,
        rows: int = 8,
        *,
        kv_dtype: str | None = None,
        implementation: str | None = None,
        profile: bool = False,
        prompts: PromptCache | None = None,
    ):
        config = model.config
        self.model = model
        self.spec = KVSpec(config.num_layers, config.num_kv_heads, config.head_dim, policy.boundaries or ())
        self.policy = policy.bind(self.spec, config.context, model.fingerprint)
        self.costs = group_costs(self.spec)
        self.rows = rows
        self.kv_dtype = kv_dtype or config.dtype
        self.implementation = implementation
        self.profile = profile
        self.prompts = prompts
        self.state: KVState = init_state(
            self.spec,
            rows=rows,
            window=self.policy.window,
            sinks=self.policy.sinks,
            high_slots=0,
            low_slots=0,
            dtype=self.kv_dtype,
        )
        self.policy_state = self.policy.init(rows)
        self.logits = jnp.zeros((rows, config.vocab_size), jnp.float32)
        self.peak_bytes = allocated_bytes(self.state)
        self.prefill_scratch_bytes = 0
        self.step_seconds: list[float] = []
        self.step_times: list[StepTimes] = []

    def run(self, requests: Iterable[Request], on_token: OnToken | None = None) -> Iterator[GenerationResult]:
        """Results as they finish, in any order. A request that fails gives a result with `error`, and fails alone.

        `on_token(request_id, record)` is called for each generated token once its actions are decided.
        """
        queue = deque(self._prepare(request) for request in requests)
        # The state never shrinks: room for the largest request at once compiles once, room by room compiles often.
        needed = [row.slots_at_admission(row.policy.expected_actions) for row in queue if isinstance(row, Row)]
        if needed:
            self.reserve(_largest(needed))
        rows: list[Row | None] = [None] * self.rows
        tables = RowTables(self.rows, self.model, self.policy.max_tags)
        try:
            while queue or any(rows):
                started = time.perf_counter()
                admitted = False
                for index in range(self.rows):
                    while rows[index] is None and queue:
                        outcome = queue.popleft()
                        if isinstance(outcome, Row):
                            self._admit(outcome, index, tables)
                            rows[index] = outcome
                            admitted = True
                        else:
                            yield outcome
                if not any(rows):
                    continue
                yield from self._step(rows, tables, on_token)
                if not admitted:
                    self.step_seconds.append(time.perf_counter() - started)
        finally:
            for index, row in enumerate(rows):
                if row is not None:
                    self.state = steps.release_row(self.state, index)

    def _prepare(self, request: Request) -> Row | GenerationResult:
        """The checked and tokenised request with its prompt's plan, or the result that says why it cannot be served."""
        policy = self.policy if request.policy is None else request.policy
        try:
            if request.policy is not None:
                self.policy.check_row_policy(request.policy)
            prompt = prompt_of(request, self.model, policy)
            labels = None
            if policy.needs.labels:
                pieces = self.model.tokenizer.token_bytes
                labels = label_tokens([pieces[token] for token in prompt])
            actions = policy.plan_prompt(len(prompt), labels)
        except JaxkvError as error:
            return self._failed(request, error)
        row = Row(request, policy, prompt, actions)
        row.limit = min(request.max_new_tokens, self.model.config.context - len(prompt))
        return row

    def _admit(self, row: Row, index: int, tables: RowTables) -> None:
        """Run a request's prompt and put it into a row of the state."""
        started = time.perf_counter()
        prompt, actions, request = row.prompt, row.prompt_actions, row.request
        row.matcher = None if request.constraint is None else request.constraint.start()
        length, padded = len(prompt), pad_capacity(len(prompt))
        padded_actions = np.zeros((padded, actions.shape[1]), np.int8)
        padded_actions[:length] = actions
        prompt_logits, k, v = self._run_prompt(prompt, padded)
        self.prefill_scratch_bytes = max(self.prefill_scratch_bytes, sum(x.nbytes for x in (*k, *v)))
        self.state, self.logits = steps.admit(
            self.state, self.logits, index, k, v, padded_actions, length, prompt_logits
        )
        if request.policy is None:
            self.policy_state = self.policy.reset_row(self.policy_state, index)
        else:
            self.policy_state = self.policy.load_row(self.policy_state, index, request.policy)
        tables.admit(index, request, row.matcher)
        self.logits.block_until_ready()
        row.seconds_prefill = time.perf_counter() - started
        row.decode_started = time.perf_counter()

    def _run_prompt(self, prompt: list[int], padded: int) -> tuple[Any, Any, Any]:
        """Last logits, and every layer's padded K and V, of a prompt that runs now or ran before."""
        if self.prompts is not None:
            found = self.prompts.get(prompt, padded)
            if found is not None:
                return found
        tokens = np.zeros((1, padded), np.int32)
        tokens[0, : len(prompt)] = prompt
        result = steps.prompt_pass(
            self.model, self.model.params, tokens, np.asarray([len(prompt)], np.int32), self.kv_dtype
        )
        if self.prompts is not None:
            self.prompts.put(prompt, *result)
        return result

    def _step(self, rows: list[Row | None], tables: RowTables, on_token: OnToken | None) -> Iterator[GenerationResult]:
        """Sample for every row, finish those that are done, and feed the others' tokens to the next forward pass."""
        packed = self._choose(tables)
        fetched = np.asarray(packed)
        for index, row in enumerate(rows):
            if row is None:
                continue
            token, fault, actions = int(fetched[index, 0]), int(fetched[index, 1]), fetched[index, 2:]
            reason = error = None
            if row.undecided:
                record = row.decide(tuple(int(a) for a in actions))
                if on_token is not None:
                    on_token(row.request.request_id, record)
            if fault:
                reason, error = "error", describe_fault(fault)
            elif token in self.model.tokenizer.stop_ids:
                reason = "stop"
            elif len(row.token_ids) == row.limit:
                reason = "length"
            elif row.request.abandon is not None and row.token_ids and row.request.abandon(row.token_ids):
                reason = "abandoned"
            if reason is not None:
                yield self._finish(row, reason, error)
                self._vacate(index, rows, tables)
                continue
            row.token_ids.append(token)
        fed = np.asarray([row is not None for row in rows])
        if not fed.any():
            return
        needed = [row.slots_for_next() for row in rows if row is not None]
        self.reserve(_largest(needed), spare=GROWTH)

        clock = time.perf_counter()
        self.logits, self.state = steps.forward(
            self.model, self.model.params, self.state, packed[:, 0], fed, self.implementation
        )
        if self.profile:
            self.logits.block_until_ready()
        forward_seconds, clock = time.perf_counter() - clock, time.perf_counter()
        for index, row in enumerate(rows):
            if row is None:
                continue
            error = self._follow(index, row, tables)
            if error is not None:
                yield self._finish(row, "error", error)
                self._vacate(index, rows, tables)
        if self.profile:
            grammar_seconds = time.perf_counter() - clock
            self.step_times.append(StepTimes(forward_seconds, grammar_seconds, self._time_policy(tables), 0.0))

    def _vacate(self, index: int, rows: list[Row | None], tables: RowTables) -> None:
        """Make a finished row inert and free for the next request."""
        rows[index] = None
        tables.clear(index)
        self.state = steps.release_row(self.state, index)

    def _follow(self, index: int, row: Row, tables: RowTables) -> str | None:
        """Advance a row's grammar over its newest token and set what the next launch needs; returns an error's text.

        Runs while the device computes the token's forward pass.
        """
        token = row.token_ids[-1]
        tags: tuple[int, ...] = ()
        try:
            if row.matcher is not None:
                transition = row.matcher.accept(token)
                row.matcher.fill_mask(tables.words[index])
                tags = transition.tags
                if row.policy.needs.tags:
                    tables.tag_ids[index], tables.parser_state[index] = row.policy.encode(transition)
        except JaxkvError as error:
            return str(error)
        row.expect(tags, self.model.tokenizer.decode([token]))
        tables.fed[index] = True
        tables.index[index] += 1
        return None

    def _choose(self, tables: RowTables) -> Any:
        clock = time.perf_counter()
        packed, self.policy_state, pending = steps.choose(
            self.policy.step,
            self.policy_state,
            self.state.pending,
            self.state.length,
            self.state.fault,
            self.logits,
            *tables.device_arguments(),
        )
        self.state = dataclasses.replace(self.state, pending=pending)
        if self.profile:
            packed.block_until_ready()
            if self.step_times:
                self.step_times[-1].sampling = time.perf_counter() - clock
        return packed

    def _time_policy(self, tables: RowTables) -> float:
        """Seconds of the policy's own step on this step's inputs; its result is not used."""
        arguments = (self.policy_state, tables.tag_ids, tables.parser_state, tables.fed)
        clock = time.perf_counter()
        actions, _ = steps.policy_only(self.policy.step, *arguments)
        actions.block_until_ready()
        return time.perf_counter() - clock

    def reserve(self, slots: Slots, spare: int = 0) -> None:
        """Grow the state where it lacks (high, low) slots, a sequence over the groups each, there by `spare` more.

        A run reserves what it needs by itself; called before, several runs share shapes and compiled programs.
        """
        have = (self.state.high_capacity, self.state.low_capacity)
        want = [
            [int(w) + (spare if w > h else 0) for w, h in zip(*pair, strict=True)]
            for pair in zip(slots, have, strict=True)
        ]
        if any(w > h for pair in zip(want, have, strict=True) for w, h in zip(*pair, strict=True)):
            self.state = grow(self.state, want[0], want[1])
            self.peak_bytes = max(self.peak_bytes, allocated_bytes(self.state))

    def _finish(self, row: Row, reason: str, error: str | None) -> GenerationResult:
        """The result of a row; its last actions are those decided so far."""
        tokenizer = self.model.tokenizer
        records = tuple(row.records)
        text = tokenizer.decode(row.token_ids)
        calls = None
        if reason == "stop" and row.request.constraint is not None:
            calls = row.request.constraint.parse(text)
        decode_actions = np.asarray([r.actions for r in records], np.int8).reshape(
            len(records), len(self.policy.groups)
        )
        policy = row.policy
        cost = request_cost(
            self.costs,
            row.prompt_actions,
            decode_actions,
            policy.window,
            policy.sinks,
            allocated_bytes(self.state),
        )
        return GenerationResult(
            request_id=row.request.request_id,
            text=text,
            token_ids=tuple(row.token_ids),
            tokens=records,
            calls=calls,
            vocabulary=None if row.request.constraint is None else row.request.constraint.vocabulary,
            finish_reason=reason,
            error=error,
            prompt_ids=tuple(row.prompt),
            prompt_texts=tokenizer.texts(row.prompt),
            prompt_actions=row.prompt_actions,
            cost=cost,
            policy=policy.name,
            calibrated=policy.calibrated,
            groups=tuple(policy.groups),
            window=policy.window,
            sinks=policy.sinks,
            seconds_prefill=row.seconds_prefill,
            seconds_decode=time.perf_counter() - row.decode_started,
        )

    def _failed(self, request: Request, error: JaxkvError) -> GenerationResult:
        """The result of a request that never got a row."""
        policy = self.policy
        return GenerationResult(
            request_id=request.request_id,
            text="",
            token_ids=(),
            tokens=(),
            calls=None,
            finish_reason="error",
            error=str(error),
            prompt_ids=(),
            prompt_texts=(),
            prompt_actions=np.zeros((0, len(policy.groups)), np.int8),
            cost=Cost(),
            policy=policy.name,
            calibrated=policy.calibrated,
            groups=tuple(policy.groups),
            window=policy.window,
            sinks=policy.sinks,
            seconds_prefill=0.0,
            seconds_decode=0.0,
        )


def _largest(slots: Sequence[Slots]) -> Slots:
    """Slots that suffice for each of several needs."""
    high, low = (np.max([need[i] for need in slots], axis=0) for i in range(2))
    return high, low


def generate(
    model: Any,
    messages: Any,
    *,
    constraint: Any = None,
    policy: Any = None,
    max_new_tokens: int = 160,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    on_token: Callable[[TokenRecord], None] | None = None,
) -> GenerationResult:
    """Generate for one conversation. `policy` is a policy, a name for `load_policy`, or None for Full KV.

    Raises RequestError where `Engine.run` would give a result with an error.
    """
    from jaxkv.policies.registry import load_policy

    if policy is None or isinstance(policy, str):
        policy = load_policy(policy or "full", model)
    request = Request(
        messages=messages,
        constraint=constraint,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )
    stream = None if on_token is None else lambda _, record: on_token(record)
    (result,) = Engine(model, policy, rows=1).run([request], stream)
    if result.finish_reason == "error":
        raise RequestError(result.error)
    return result
