"""Runs requests under many policies at once: shards of equal shapes, prompts that run once, files that survive a kill.

A *job* is one case under one candidate policy. Jobs of a *shard* share the capacities of the KV state, so that one
compiled program serves them all, and rows of one batch may belong to different candidates (`PaskRows`). What a
candidate gives on a shard is one file, written when its last case is done; a run that is killed goes on from there. A
row's tokens do not depend on its neighbours, so the bytes are the same as without a kill.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibration.oracle import abandon
from jaxkv.engine import Engine, Request
from jaxkv.engine.prompts import PromptCache
from jaxkv.errors import EvaluationError
from jaxkv.evaluation import bfcl_checker
from jaxkv.evaluation.bfcl import Case
from jaxkv.evaluation.bfcl_run import constraint_of
from jaxkv.evaluation.figures import write_atomically
from jaxkv.grammar.function_calling import FunctionCalls
from jaxkv.policies.pask.policy import Pask
from jaxkv.policies.pask.rows import FixedActions, PaskRows
from jaxkv.state.kv_state import pad_capacity
from jaxkv.state.payload import KVSpec


@dataclass(frozen=True)
class Candidate:
    """A policy to run, and what decides the shapes that it needs.

    Fields:
        name: unique within a stage, and a file name.
        policy: `FixedActions` or a bound `Pask`.
        low_prompt, low_answer: for each layer group, whether tokens of the prompt and of the answer may become LOW.
    """

    name: str
    policy: FixedActions | Pask
    low_prompt: tuple[bool, ...]
    low_answer: tuple[bool, ...]


@dataclass(frozen=True)
class Shard:
    """Cases whose prompts fit `prompt_slots`, and candidates that need low slots in the same places."""

    prompt_slots: int
    low_prompt: tuple[bool, ...]
    low_answer: tuple[bool, ...]

    @property
    def name(self) -> str:
        marks = ["".join("L" if low else "-" for low in groups) for groups in (self.low_prompt, self.low_answer)]
        return f"{self.prompt_slots}.{marks[0]}.{marks[1]}"


@dataclass
class Outcome:
    """One case under one candidate. `cost` is `payload.Cost` as a dict."""

    id: str
    correct: bool
    finish_reason: str
    tokens: int
    cost: dict[str, int]
    token_ids: list[int]


def prompt_classes(lengths: Sequence[int], extra: int, classes: int = 3) -> tuple[int, ...]:
    """Up to `classes` prompt capacities that give the fewest slots over all cases, `extra` each included."""
    sizes = sorted({pad_capacity(length + extra) for length in lengths})
    weights = [sum(pad_capacity(length + extra) == size for length in lengths) for size in sizes]

    def slots(chosen: Sequence[int]) -> int:
        return sum(w * min(c for c in chosen if c >= size) for size, w in zip(sizes, weights, strict=True))

    options = [
        (*chosen, sizes[-1])
        for number in range(min(classes, len(sizes)))
        for chosen in itertools.combinations(sizes[:-1], number)
    ]
    return tuple(size - extra for size in min(options, key=slots))


class Bench:
    """A model, the cases of a run, and the folder that keeps what was measured.

    Args:
      model: from `load_model`.
      like: a PASK policy of the grammar; its window and sinks hold for all candidates.
      cases: every case that may run.
      folder: of the run.
      rows: requests decoded together.
      max_new_tokens: longest answer.
      prompts: folder of the prompt passes; by default inside `folder`.
    """

    def __init__(
        self,
        model: Any,
        like: Pask,
        cases: Sequence[Case],
        folder: Path,
        *,
        rows: int,
        max_new_tokens: int,
        prompts: Path | None = None,
    ):
        config = model.config
        self.model, self.folder = model, folder
        self.rows, self.max_new_tokens = rows, max_new_tokens
        self.spec = KVSpec(config.num_layers, config.num_kv_heads, config.head_dim, like.boundaries or ())
        self.policy = PaskRows(like.bind(self.spec, config.context, model.fingerprint))
        self.prompts = PromptCache(prompts or folder / "prompts", model.fingerprint, config.dtype)
        self.cases = {case.id: case for case in cases}
        self._constraints: dict[str, FunctionCalls] = {}
        self.prompt_ids = {case.id: model.tokenizer.apply_chat_template(case.messages) for case in cases}
        self.classes = prompt_classes([len(ids) for ids in self.prompt_ids.values()], max_new_tokens)

    @property
    def like(self) -> Pask:
        """The bound policy whose window, sinks and costs the candidates share."""
        return self.policy.like

    def constraint(self, case: Case) -> FunctionCalls:
        """The grammar of a case's answer, compiled once."""
        if case.id not in self._constraints:
            self._constraints[case.id] = constraint_of(case, self.model)
        return self._constraints[case.id]

    def run(
        self,
        stage: str,
        jobs: Iterable[tuple[Candidate, Sequence[Case]]],
        *,
        give_up: bool,
        on_case: Callable[[int], None] = lambda tokens: None,
    ) -> dict[str, dict[str, Outcome]]:
        """Outcomes of every candidate by case id; what is in the run's folder already is read, not run.

        `give_up` stops an answer once it cannot be right any more (`oracle`). `on_case` gets the generated tokens of
        each finished case, 0 for one that was there.
        """
        shards: dict[Shard, list[tuple[Candidate, list[Case]]]] = {}
        for candidate, cases in jobs:
            by_size: dict[int, list[Case]] = {}
            for case in cases:
                by_size.setdefault(self._class_of(case), []).append(case)
            for size, inside in by_size.items():
                shard = Shard(size, candidate.low_prompt, candidate.low_answer)
                shards.setdefault(shard, []).append((candidate, inside))
        found: dict[str, dict[str, Outcome]] = {}
        for shard in sorted(shards, key=lambda one: one.name):
            pending = []
            for candidate, cases in shards[shard]:
                path = self._path(stage, shard, candidate)
                there = read_outcomes(path, [case.id for case in cases])
                if there is None:
                    pending.append((candidate, cases))
                    continue
                found.setdefault(candidate.name, {}).update(there)
                for _ in cases:
                    on_case(0)
            for candidate, outcomes in self._run_shard(shard, pending, give_up, on_case):
                text = json.dumps([dataclasses.asdict(one) for one in outcomes.values()]) + "\n"
                write_atomically(self._path(stage, shard, candidate), text)
                found.setdefault(candidate.name, {}).update(outcomes)
        return found

    def _path(self, stage: str, shard: Shard, candidate: Candidate) -> Path:
        return self.folder / stage / "outcomes" / shard.name / f"{candidate.name}.json"

    def _class_of(self, case: Case) -> int:
        length = len(self.prompt_ids[case.id])
        return next(size for size in self.classes if length <= size)

    def _run_shard(
        self,
        shard: Shard,
        jobs: Sequence[tuple[Candidate, Sequence[Case]]],
        give_up: bool,
        on_case: Callable[[int], None],
    ) -> Iterator[tuple[Candidate, dict[str, Outcome]]]:
        """Run jobs in order; gives each candidate once its last case is done, outcomes in the order of its cases."""
        if not jobs:
            return
        engine = Engine(self.model, self.policy, rows=self.rows, prompts=self.prompts)
        slots = shard.prompt_slots, self.max_new_tokens
        low = [p * slots[0] + a * slots[1] for p, a in zip(shard.low_prompt, shard.low_answer, strict=True)]
        engine.reserve(([sum(slots)] * len(low), low))
        requests, owner = [], {}
        for number, (candidate, cases) in enumerate(jobs):
            for case in cases:
                name = f"{number}/{case.id}"
                owner[name] = (number, case)
                requests.append(
                    Request(
                        request_id=name,
                        prompt_ids=self.prompt_ids[case.id],
                        constraint=self.constraint(case),
                        max_new_tokens=self.max_new_tokens,
                        policy=candidate.policy,
                        abandon=abandon(case, self.model.tokenizer.decode) if give_up else None,
                    )
                )
        done: list[dict[str, Outcome]] = [{} for _ in jobs]
        for result in engine.run(requests):
            number, case = owner[result.request_id]
            if result.finish_reason == "error":
                raise EvaluationError(f"{case.id} under {jobs[number][0].name}: {result.error}")
            done[number][case.id] = Outcome(
                id=case.id,
                correct=bfcl_checker.check(case, result.calls).correct,
                finish_reason=result.finish_reason,
                tokens=len(result.token_ids),
                cost=dataclasses.asdict(result.cost),
                token_ids=list(result.token_ids),
            )
            on_case(len(result.token_ids))
            candidate, cases = jobs[number]
            if len(done[number]) == len(cases):
                yield candidate, {case.id: done[number][case.id] for case in cases}
                done[number] = {}


def read_outcomes(path: Path, ids: Sequence[str]) -> dict[str, Outcome] | None:
    """The outcomes in a file, or None where there is no file. EvaluationError for one that holds other cases."""
    try:
        entries: list[Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        found = {entry["id"]: Outcome(**entry) for entry in entries}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise EvaluationError(f"{path} cannot be read ({error}); remove it to run its candidate anew") from error
    if list(found) != list(ids):
        raise EvaluationError(f"{path} holds other cases than this run's; use another folder, or remove it")
    return found
