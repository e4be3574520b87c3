"""When a run's verdict is decided before its answer ends.

An answer fails for certain once it holds a call that no expected call accepts: a wrong function name, a finished
argument with a wrong value, one call too many. Calibration counts failures, so it may stop there; nothing that is still
open is judged. The official checker looks at each argument by itself, which is what makes this sound: an answer that
this module gives up would have failed however it went on.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxkv.evaluation import bfcl_checker
from jaxkv.evaluation.bfcl import Case, gold_calls

_NAME = re.compile(r'\{\s*"name":\s*("(?:[^"\\]|\\.)*")')
_ARGUMENTS = re.compile(r'\s*,\s*"arguments":\s*\{')
_ENDS = frozenset(',}]"')
_DECODER = json.JSONDecoder()


def is_lost(case: Case, text: str) -> bool:
    """Whether an answer that begins with `text` fails whatever follows."""
    calls, partial = _read(text)
    if partial is not None and not _may_match(case, partial):
        return True
    if not calls:
        return False
    if len(calls) > len(case.gold):
        return True
    matches = [[i for i in range(len(case.gold)) if _matches(case, i, call)] for call in calls]
    return not _distinct(matches, {}, 0)


def abandon(case: Case, decode: Callable[[Sequence[int]], str]) -> Callable[[Sequence[int]], bool]:
    """`Request.abandon` for a case: looks at the text whenever a name, an argument or a call may have ended."""

    def lost(token_ids: Sequence[int]) -> bool:
        return bool(set(decode(token_ids[-1:])) & _ENDS) and is_lost(case, decode(token_ids))

    return lost


def lost_after(case: Case, token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> int | None:
    """After how many tokens a given answer is abandoned, or None."""
    lost = abandon(case, decode)
    return next((n for n in range(1, len(token_ids) + 1) if lost(token_ids[:n])), None)


def _read(text: str) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The finished calls of an answer, and what is known of the one in progress: its name and finished arguments."""
    at, calls = 0, []
    while True:
        while at < len(text) and text[at] in " \t\r\n[,":
            at += 1
        if at >= len(text) or text[at] != "{":
            return calls, None
        try:
            value, at = _DECODER.raw_decode(text, at)
            calls.append(value)
        except ValueError:
            return calls, _in_progress(text, at)


def _in_progress(text: str, at: int) -> dict[str, Any] | None:
    name = _NAME.match(text, at)
    if name is None:
        return None
    call: dict[str, Any] = {"name": json.loads(name[1]), "arguments": {}}
    opening = _ARGUMENTS.match(text, name.end())
    if opening is None:
        return call
    at = opening.end()
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        try:
            key, at = _DECODER.raw_decode(text, at)
            colon = text.index(":", at) + 1
            while text[colon] in " \t\r\n":
                colon += 1
            value, at = _DECODER.raw_decode(text, colon)
        except (ValueError, IndexError):
            return call
        if at >= len(text):  # a number may go on
            return call
        call["arguments"][key] = value


def _may_match(case: Case, partial: dict[str, Any]) -> bool:
    """Whether some expected call accepts the name and the finished arguments of a call in progress."""
    golds = gold_calls(case)
    for i, gold in enumerate(golds):
        if gold["name"] != partial["name"]:
            continue
        if _matches(case, i, {"name": gold["name"], "arguments": gold["arguments"] | partial["arguments"]}):
            return True
        if not _matches(case, i, gold):  # the expected values themselves do not pass: nothing can be said
            return True
    return False


def _matches(case: Case, expected: int, call: Any) -> bool:
    """Whether the official checker takes `call` for the expected call of that number."""
    gold = case.gold[expected]
    tools = [tool for tool in case.tools if tool["name"] in gold]
    alone = dataclasses.replace(case, category="simple_python", tools=tools or case.tools, gold=[gold], parallel=False)
    return bfcl_checker.check(alone, [call]).correct


def _distinct(matches: Sequence[Sequence[int]], taken: dict[int, int], at: int) -> bool:
    """Whether every call can have an expected call of its own."""
    if at == len(matches):
        return True
    return any(_distinct(matches, taken | {gold: at}, at + 1) for gold in matches[at] if gold not in taken)
