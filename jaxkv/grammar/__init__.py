"""Grammars: what the model may say next, and which structural part each of its tokens belongs to."""

from jaxkv.grammar.constraint import Acceptance, Constraint, GrammarConstraint, Matcher, Transition
from jaxkv.grammar.function_calling import FunctionCalls
from jaxkv.grammar.sql import SqlQueries
from jaxkv.grammar.tags import CALL_VOCABULARY, SQL_VOCABULARY, UNRESOLVED, Tag, TagVocabulary

__all__ = [
    "CALL_VOCABULARY",
    "SQL_VOCABULARY",
    "UNRESOLVED",
    "Acceptance",
    "Constraint",
    "FunctionCalls",
    "GrammarConstraint",
    "Matcher",
    "SqlQueries",
    "Tag",
    "TagVocabulary",
    "Transition",
]
