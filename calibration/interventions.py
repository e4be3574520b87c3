"""Runtime-V: which runs an intervention needs, and how many more cases fail under it (PASK §3.4, Eq. 5).

An intervention gives one bucket (key, layer group) one action, R or L, and everything else H. A token of several keys
has the maximum over them (Eq. 12), so that it changes only where all of them do.

A case whose reference run never has an affected token beyond the recent window is the reference run, and is not run
again. That is exact: until then every key and value is the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from jaxtyping import Int

from calibration.bench import Candidate, Outcome
from calibration.buckets import Keys
from jaxkv.grammar.prompt_labels import PROMPT_LABELS
from jaxkv.policies.pask.policy import Pask
from jaxkv.policies.pask.rows import FixedActions
from jaxkv.state.actions import ACTION_NAMES, HIGH, LOW, RELEASE

Stage = Literal["decode", "prompt"]
STAGES: Final[tuple[Stage, ...]] = ("decode", "prompt")
INTERVENED: Final = (RELEASE, LOW)


@dataclass(frozen=True)
class Trajectory:
    """What the all-high policy generated for a case, its stop token left out.

    Fields:
        keys: the decode keys that each token may belong to; () is unresolved.
        states: the parser state after each token.
        labels: the labels that each prompt token may belong to.
        decided: tokens after which the answer's failure was certain, or all of them.
    """

    id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    keys: tuple[tuple[int, ...], ...]
    states: tuple[str, ...]
    labels: tuple[tuple[int, ...], ...]
    decided: int
    correct: bool

    def affected(self, stage: Stage, key: int, window: int, sinks: int) -> bool:
        """Whether an intervention on a key changes anything that this run reads."""
        if stage == "prompt":
            inside = self.labels[sinks : max(sinks, len(self.labels) - window)]
            return any(candidates == (key,) for candidates in inside)
        leaving = self.keys[: max(0, self.decided - window)]
        return any(candidates == (key,) for candidates in leaving)


@dataclass(frozen=True)
class Intervention:
    """Action `action` for bucket (key, group) of a stage."""

    stage: Stage
    key: int
    group: int
    action: int

    def candidate(self, keys: Keys, like: Pask) -> Candidate:
        """The policy to run. `like` is bound; a model of one layer group ties them all."""
        groups = len(like.groups)
        decode = np.full((keys.vocabulary.size, groups), HIGH, np.int8)
        prompt = np.full((len(PROMPT_LABELS), groups), HIGH, np.int8)
        if self.stage == "decode":
            decode[keys.tags(self.key), self.group] = self.action
            name = keys.names[self.key].replace("/", "+").replace("*", "any")
        else:
            prompt[self.key, self.group] = self.action
            name = PROMPT_LABELS[self.key]
        low = tuple(self.action == LOW and group == self.group for group in range(groups))
        none = (False,) * groups
        name = f"{name}.{like.groups[self.group]}.{ACTION_NAMES[self.action]}"
        return Candidate(
            name=name,
            policy=FixedActions(name, like, decode, prompt),
            low_prompt=low if self.stage == "prompt" else none,
            low_answer=low if self.stage == "decode" else none,
        )


def interventions(stage: Stage, observed: Sequence[int], groups: int) -> list[Intervention]:
    """All interventions of a stage on the keys that occur, in bucket order; R before L."""
    return [
        Intervention(stage, key, group, action) for key in observed for group in range(groups) for action in INTERVENED
    ]


def extra_failures(
    found: Mapping[str, Mapping[str, Outcome]],
    names: Mapping[Intervention, str],
    trajectories: Sequence[Trajectory],
    shape: tuple[int, int],
) -> Int[np.ndarray, "Q C 2"]:
    """Failures of each intervention beyond the reference's; a case that was not run has the reference's verdict."""
    extra = np.zeros((*shape, len(INTERVENED)), np.int64)
    for one, name in names.items():
        outcomes = found.get(name, {})
        extra[one.key, one.group, INTERVENED.index(one.action)] = sum(
            int(t.correct) - int(outcomes[t.id].correct) for t in trajectories if t.id in outcomes
        )
    return extra
