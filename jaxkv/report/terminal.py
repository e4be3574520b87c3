"""A run in the terminal: every token above its action in each layer group, costs, calls."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from jaxkv.report.view import (
    TokenView,
    action_counts,
    answer_tokens,
    human_bits,
    prompt_tokens,
    ratios,
)

if TYPE_CHECKING:
    from jaxkv.engine.result import GenerationResult

_STYLES = ("black on bright_black", "black on yellow", "black on green")
UNCALIBRATED = "uncalibrated policy: its floors and priorities were set by hand, not measured"


def print_run(
    result: "GenerationResult",
    console: Console,
    *,
    show_prompt: bool = False,
    vocabulary: Any = None,
) -> None:
    """Print the map of a run, its costs and how it ended.

    Args:
        result: one generation.
        console: decides width and colour; without colour the letters H, L and - carry the map alone.
        show_prompt: print the prompt's tokens one by one, not only how many have which action.
        vocabulary: names of the tags; by default the function-call vocabulary.
    """
    groups = tuple(result.groups)
    prompt = prompt_tokens(result)
    answer = answer_tokens(result, vocabulary)
    console.print(Text(f"policy {result.policy}", style="bold"))
    if not result.calibrated:
        console.print(Text(f"! {UNCALIBRATED}", style="bold yellow"))
    console.print(_legend())
    console.print(Text(f"prompt: {len(prompt)} tokens", style="bold"))
    for counts in action_counts(prompt, groups):
        console.print(Text(f"  {counts.group}: {counts.high} high, {counts.low} low, {counts.release} released"))
    if show_prompt:
        print_map(prompt, groups, console)
    console.print(Text(f"answer: {len(answer)} tokens, ended by {result.finish_reason}", style="bold"))
    if result.error is not None:
        console.print(Text(f"  error: {result.error}", style="bold red"), soft_wrap=True)
    print_map(answer, groups, console)
    print_costs(result.cost, console)


def print_map(tokens: Sequence[TokenView], groups: Sequence[str], console: Console) -> None:
    """Token texts in a row, one row of actions a layer group below it, wrapped to the console's width."""
    label = max((cell_len(group) for group in groups), default=0) + 1
    room = max(console.width - label, 8)
    for line in _wrap(tokens, room):
        header = Text(" " * label, no_wrap=True)
        for token in line:
            header.append(_fit(token.text, room - 1) + " ", style="bold")
        console.print(header)
        for index, group in enumerate(groups):
            row = Text(group.ljust(label), no_wrap=True)
            for token in line:
                width = cell_len(_fit(token.text, room - 1))
                if token.actions:
                    row.append(token.letters[index].ljust(width), style=_STYLES[token.actions[index]])
                else:
                    row.append(" " * width)
                row.append(" ")
            console.print(row)


def print_costs(cost: Any, console: Console) -> None:
    """The four ratios with numerator, denominator and definition, and the allocated bytes."""
    console.print(Text("KV payload against Full KV", style="bold"))
    for ratio in ratios(cost):
        sums = f"{human_bits(ratio.numerator)} / {human_bits(ratio.denominator)}"
        console.print(Text(f"  {ratio.name:<8}{ratio.percent:>11}  = {sums}", style="bold" * (ratio.name == "total")))
        console.print(Padding(Text(ratio.definition, style="dim"), (0, 0, 0, 10)))
    console.print(Text(f"  allocated: {human_bits(8 * cost.allocated_bytes)}, padding, scales and slot maps included"))


def _legend() -> Text:
    legend = Text()
    for letter, name, style in zip("HL-", ("high", "low", "released"), reversed(_STYLES), strict=True):
        legend.append(f" {letter} ", style=style).append(f" {name}  ")
    return legend


def _fit(text: str, room: int) -> str:
    """Text cut to `room` cells, and at least one cell wide."""
    if cell_len(text) <= room:
        return text or " "
    kept = ""
    for character in text:
        if cell_len(kept + character) > room - 1:
            break
        kept += character
    return kept + "…"


def _wrap(tokens: Sequence[TokenView], room: int) -> list[list[TokenView]]:
    lines: list[list[TokenView]] = []
    used = room
    for token in tokens:
        width = cell_len(_fit(token.text, room - 1)) + 1
        if used + width > room:
            lines.append([])
            used = 0
        lines[-1].append(token)
        used += width
    return lines
