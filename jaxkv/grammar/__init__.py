"""Grammars: what the model may say next, and which structural part each of its tokens belongs to."""

from jaxkv.grammar.constraint import Constraint, GrammarConstraint, Matcher, Transition
from jaxkv.grammar.function_calling import Acceptance, FunctionCalls
from jaxkv.grammar.tags import CALL_VOCABULARY, UNRESOLVED, Tag, TagVocabulary

__all__ = [
    "CALL_VOCABULARY",
    "UNRESOLVED",
    "Acceptance",
    "Constraint",
    "FunctionCalls",
    "GrammarConstraint",
    "Matcher",
    "Tag",
    "TagVocabulary",
    "Transition",
]
