"""Which pairs of a decode and a prompt controller to run together: predicted from what each does alone."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

Pair = tuple[int | None, int | None]
PAIRS_EACH = 3
"""Pairs that are run for each target."""


def pairs_to_run(
    decode: Mapping[str, Any], prompt: Mapping[str, Any], weights: tuple[int, int], targets: Sequence[Fraction]
) -> list[Pair]:
    """Pairs of indices into two stages' controllers (None is all-high), each once.

    A pair's predicted failures beyond the control's are the sum of both stages'; its predicted ratio is that of the
    stages' ratios, `weights` the tokens of prompts and of answers. For every target the best few that fit it, ties by
    ratio and index; and the pair that Eq. 9 selected.
    """
    control = decode["control"]["failures"]
    options = {
        name: [
            (None, 0, Fraction(1)),
            *((i, one["failures"] - control, Fraction(one["ratio"])) for i, one in enumerate(stage["controllers"])),
        ]
        for name, stage in (("decode", decode), ("prompt", prompt))
    }
    prompts, answers = weights
    predicted = [
        (d_extra + p_extra, (p_ratio * prompts + d_ratio * answers) / (prompts + answers), (d, p))
        for d, d_extra, d_ratio in options["decode"]
        for p, p_extra, p_ratio in options["prompt"]
    ]
    predicted.sort(key=lambda one: one[:2])
    chosen: list[Pair] = [(decode["selected"], prompt["selected"])]
    for target in targets:
        chosen += [pair for _, ratio, pair in predicted if ratio <= target][:PAIRS_EACH]
    return [pair for pair in dict.fromkeys(chosen) if pair != (None, None)]
