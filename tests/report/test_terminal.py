"""The terminal report: readable without colour, never wider than the terminal, harmless to it."""

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from jaxkv.report.terminal import print_map, print_run
from jaxkv.report.view import TokenView, answer_tokens, visible


def printed(draw, width=80, **options):
    stream = io.StringIO()
    draw(Console(file=stream, width=width, **options))
    return stream.getvalue()


def test_without_colour_the_letters_carry_the_map(make_result, vocabulary):
    text = printed(lambda console: print_run(make_result(), console, vocabulary=vocabulary))
    assert "\x1b" not in text
    lines = [line.split() for line in text.splitlines()]
    assert ["lower", "H", "H", "-"] in lines
    assert ["middle", "L", "H", "-"] in lines
    assert ["upper", "-", "H", "L"] in lines
    assert "lower: 2 high, 1 low, 0 released" in text
    assert "upper: 2 high, 0 low, 1 released" in text
    assert "45.8%" in text
    assert "550 B / 1.2 kB" in text
    assert "uncalibrated" not in text


def test_letters_stand_under_their_token(make_result, vocabulary):
    result = make_result()
    tokens = answer_tokens(result, vocabulary)
    lines = printed(lambda console: print_map(tokens, result.groups, console)).splitlines()
    for token in tokens[:3]:
        column = lines[0].index(token.text)
        assert [line[column] for line in lines[1:4]] == list(token.letters)


def test_an_uncalibrated_policy_is_named_so(make_result, vocabulary):
    text = printed(lambda console: print_run(make_result(calibrated=False), console, vocabulary=vocabulary))
    assert "uncalibrated policy" in text


@pytest.mark.parametrize("width", [24, 40, 80])
def test_the_map_stays_within_the_terminal(width):
    texts = ["a", "天気予報", "x" * 100, "", "名" * 60, *("token" for _ in range(40))]
    tokens = [TokenView(i, i, text, (i % 3, 2, 1)) for i, text in enumerate(texts)]
    lines = printed(lambda console: print_map(tokens, ("lower", "middle", "upper"), console), width).splitlines()
    assert max(cell_len(line.rstrip()) for line in lines) <= width
    assert sum(line.count("token") for line in lines) == 40
    assert sum(line.count("H") for line in lines) == len(tokens) + sum(i % 3 == 2 for i in range(len(tokens)))


def test_token_text_cannot_steer_the_terminal():
    assert visible(" \x1b[2J\n\tname  ") == "·\\x1b[2J↵⇥name··"
    assert visible("   ") == "···"
    assert visible("naïve 天") == "naïve 天"


def test_markup_of_rich_in_a_token_is_text(make_result, vocabulary):
    result = make_result(tokens=(make_result().tokens[0]._replace(text="[red]x[/red]"),), error="[bold]e[/bold]")
    text = printed(lambda console: print_run(result, console, vocabulary=vocabulary))
    assert "[red]x[/red]" in text
    assert "[bold]e[/bold]" in text


def test_the_prompt_can_be_shown_token_by_token(make_result, vocabulary):
    def draw(console):
        print_run(make_result(prompt_texts=("one", "two", "three")), console, show_prompt=True, vocabulary=vocabulary)

    lines = [line.split() for line in printed(draw).splitlines()]
    assert ["one", "two", "three"] in lines
    assert ["upper", "H", "-", "H"] in lines
