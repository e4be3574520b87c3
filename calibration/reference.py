"""Reference runs: every case under the all-high policy, followed by its grammar for tags and parser states."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from calibration.algorithm import Reference
from calibration.bench import Bench, Candidate, Outcome
from calibration.buckets import Keys
from calibration.interventions import Trajectory
from calibration.oracle import lost_after
from jaxkv.evaluation.bfcl import Case
from jaxkv.grammar.prompt_labels import PROMPT_LABELS, label_tokens
from jaxkv.policies.pask.policy import Pask
from jaxkv.policies.pask.rows import FixedActions
from jaxkv.state.actions import HIGH


def all_high_candidate(like: Pask) -> Candidate:
    """The all-high policy as a candidate: nothing is ever low."""
    groups = len(like.groups)
    decode = np.full((like.vocabulary.size, groups), HIGH, np.int8)
    prompt = np.full((len(PROMPT_LABELS), groups), HIGH, np.int8)
    none = (False,) * groups
    return Candidate("all_high", FixedActions("all_high", like, decode, prompt), none, none)


def run_reference(bench: Bench, part: str, cases: Sequence[Case], on_case: Callable[[int], None]) -> dict[str, Outcome]:
    """Whole answers of all cases of a part of the split, in its order."""
    candidate = all_high_candidate(bench.like)
    found = bench.run(f"reference/{part}", [(candidate, cases)], give_up=False, on_case=on_case)
    return {case.id: found[candidate.name][case.id] for case in cases}


def trajectory(bench: Bench, case: Case, outcome: Outcome, keys: Keys) -> Trajectory:
    """A reference run with the keys, parser states and prompt labels of its tokens."""
    matcher = bench.constraint(case).start()
    transitions = [matcher.accept(token) for token in outcome.token_ids]
    decode: Any = bench.model.tokenizer.decode
    lost = None if outcome.correct else lost_after(case, outcome.token_ids, decode)
    pieces = bench.model.tokenizer.token_bytes
    prompt = bench.prompt_ids[case.id]
    return Trajectory(
        id=case.id,
        prompt_ids=tuple(prompt),
        token_ids=tuple(outcome.token_ids),
        keys=tuple(keys.of_token(one.tags) for one in transitions),
        states=tuple(one.parser_state for one in transitions),
        labels=label_tokens([pieces[token] for token in prompt]),
        decided=len(outcome.token_ids) if lost is None else lost,
        correct=outcome.correct,
    )


def reference_of(trajectories: Sequence[Trajectory]) -> Reference:
    """The trajectories in the form that Algorithm 1 counts with."""
    kinds: dict[tuple[int, ...], int] = {}
    states: dict[str, int] = {}
    for one in trajectories:
        for keys, state in zip(one.keys, one.states, strict=True):
            kinds.setdefault(keys, len(kinds))
            states.setdefault(state, len(states))
    return Reference(
        candidates=tuple(kinds),
        kinds=tuple(np.array([kinds[keys] for keys in one.keys], np.int64) for one in trajectories),
        states=tuple(np.array([states[state] for state in one.states], np.int64) for one in trajectories),
        state_names=tuple(states),
    )


def prompt_reference(trajectories: Sequence[Trajectory], window: int, sinks: int) -> Reference:
    """The prompts in the same form: a token's keys are its labels; protected ones, the sinks and the last window, none.

    A token without a key counts HIGH, which is what protection costs.
    """
    kinds: dict[tuple[int, ...], int] = {}
    sequences = []
    for one in trajectories:
        last = len(one.labels) - window
        found = [labels if sinks <= i < last else () for i, labels in enumerate(one.labels)]
        sequences.append(np.array([kinds.setdefault(labels, len(kinds)) for labels in found], np.int64))
    return Reference(tuple(kinds), tuple(sequences), tuple(np.zeros_like(s) for s in sequences), ("",))
