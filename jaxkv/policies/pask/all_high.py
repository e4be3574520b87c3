"""The all-high controller (PASK A.4): actions and floors HIGH, B_D = 1, no reserve; exactly Full KV's tokens."""

from fractions import Fraction
from importlib.metadata import version

from jaxkv.grammar.tags import CALL_VOCABULARY, TagVocabulary
from jaxkv.policies.pask.frozen_policy import PROMPT_LABELS, FrozenPolicy, tag_names
from jaxkv.policies.pask.table import Entry
from jaxkv.state.actions import HIGH
from jaxkv.state.payload import GROUP_NAMES


def all_high(vocabulary: TagVocabulary = CALL_VOCABULARY) -> FrozenPolicy:
    """Algorithm 1's fallback, for any model, the installed XGrammar and the grammars of `vocabulary`."""
    row = (Entry(HIGH, HIGH, (0.0, 0.0)),) * len(GROUP_NAMES)
    return FrozenPolicy(
        name="all_high" if vocabulary is CALL_VOCABULARY else f"all_high_{vocabulary.family}",
        calibrated=True,
        note="The feasible fallback of PASK's policy selection (A.4): everything HIGH. It needs no calibration.",
        decode=dict.fromkeys(tag_names(vocabulary), row),
        prompt=dict.fromkeys(PROMPT_LABELS, row),
        budget_decode=Fraction(1),
        budget_prompt=Fraction(1),
        vocabulary=vocabulary,
        xgrammar=version("xgrammar"),
    )
