"""The all-high controller (PASK A.4): actions and floors HIGH, B_D = 1, no reserve; exactly Full KV's tokens."""

from fractions import Fraction
from importlib.metadata import version

from jaxkv.policies.pask.frozen_policy import CALL_VOCABULARY, PROMPT_LABELS, FrozenPolicy, tag_names
from jaxkv.policies.pask.table import Entry
from jaxkv.state.actions import HIGH
from jaxkv.state.payload import GROUP_NAMES


def all_high() -> FrozenPolicy:
    """Algorithm 1's fallback, for any model and the installed grammar."""
    row = (Entry(HIGH, HIGH, (0.0, 0.0)),) * len(GROUP_NAMES)
    return FrozenPolicy(
        name="all_high",
        calibrated=True,
        note="The feasible fallback of PASK's policy selection (A.4): everything HIGH. It needs no calibration.",
        decode=dict.fromkeys(tag_names(CALL_VOCABULARY), row),
        prompt=dict.fromkeys(PROMPT_LABELS, row),
        budget_decode=Fraction(1),
        budget_prompt=Fraction(1),
        xgrammar=version("xgrammar"),
    )
