"""The HTML report: nothing that a model wrote becomes markup, and the map says what the result says."""

import html
import re
from html.parser import HTMLParser

import pytest

from jaxkv.errors import JaxkvError
from jaxkv.report.html import render_html, write_html

HOSTILE = '<script>alert("1")</script>&amp;\'"><img src=x onerror=alert(2)>'


class Page(HTMLParser):
    """Collects tags and the map's tokens: title and letters of each."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.tokens: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if attributes.get("class") == "token":
            self.tokens.append((attributes["title"], ""))
        if tag == "i":
            title, letters = self.tokens[-1]
            self.tokens[-1] = (title, letters + attributes["class"])


@pytest.mark.parametrize("where", ["token", "prompt", "call", "text", "error", "policy", "model", "title", "reason"])
def test_nothing_a_model_or_user_wrote_becomes_markup(where, make_result, vocabulary):
    result = make_result()
    options = {"vocabulary": vocabulary}
    if where == "token":
        result = make_result(tokens=(result.tokens[0]._replace(text=HOSTILE),))
    elif where == "prompt":
        result = make_result(prompt_texts=(HOSTILE, "b", "c"))
    elif where == "call":
        result = make_result(calls=[{"name": HOSTILE, "arguments": {HOSTILE: HOSTILE}}])
    elif where == "text":
        result = make_result(text=HOSTILE, calls=None)
    elif where == "reason":
        result = make_result(finish_reason=HOSTILE)
    elif where in ("model", "title"):
        options[where] = HOSTILE
    else:
        result = make_result(**{where: HOSTILE})
    page = render_html(result, **options)
    assert "<script" not in page
    assert "<img" not in page
    assert "script" not in Page(page).tags
    assert "alert" in html.unescape(page)  # it is shown, as text


def test_the_page_needs_nothing_else(make_result, vocabulary):
    page = render_html(make_result(), vocabulary=vocabulary)
    assert Page(page).links == []
    assert "http" not in page
    assert "@import" not in page
    assert "url(" not in page
    assert "prefers-color-scheme: dark" in page


def test_the_map_shows_each_tokens_action_tags_and_text(make_result, vocabulary):
    page = Page(render_html(make_result(), vocabulary=vocabulary))
    assert [letters for _, letters in page.tokens] == [
        *("a2a1a0", "a2a2a2", "a0a0a1", ""),  # the answer, its stop token without actions
        *("a2a2a2", "a1a1a0", "a2a2a2"),  # the prompt
    ]
    title = page.tokens[1][0]
    assert title.splitlines() == [
        "token 4, id 11: name",
        "lower: high",
        "middle: high",
        "upper: high",
        "tag: class-2 / role / state / next",
        "tag: class-3 / role / state / next",
    ]
    assert page.tokens[4][0].startswith("token 0, id 5: <s>")


def test_a_tag_that_nothing_resolved_is_named_so(make_result, vocabulary):
    token = make_result().tokens[0]._replace(tags=(-2,))
    page = Page(render_html(make_result(tokens=(token,)), vocabulary=vocabulary))
    assert page.tokens[0][0].splitlines()[-1] == "tag: unresolved"


def test_the_banner_is_there_only_for_an_uncalibrated_policy(make_result, vocabulary):
    assert "uncalibrated" not in render_html(make_result(), vocabulary=vocabulary)
    assert "uncalibrated policy" in render_html(make_result(calibrated=False), vocabulary=vocabulary)


def test_every_ratio_is_shown_with_its_numerator_and_denominator(make_result, vocabulary):
    page = re.sub(r"\s+", " ", render_html(make_result(), vocabulary=vocabulary))
    for name, percent, numerator, denominator in [
        ("total", "45.8%", 4400, 9600),
        ("prefill", "66.7%", 3200, 4800),
        ("decode", "25.0%", 1200, 4800),
        ("live", "90.0%", 900, 1000),
    ]:
        assert re.search(
            rf'<td>{name}</td><td class="number">{percent}</td> '
            rf'<td class="number" title="{numerator} bits">[^<]*</td> <td class="number" title="{denominator} bits">',
            page,
        ), name
    assert 'title="123456 bytes">123.5 kB' in page


def test_an_answer_of_nothing_still_has_a_page(make_result, vocabulary):
    empty = make_result(
        tokens=(), calls=None, finish_reason="error", error="prompt too long", cost=type(make_result().cost)()
    )
    page = render_html(empty, vocabulary=vocabulary)
    assert "prompt too long" in page
    assert "not defined" in page  # ratios of nothing


def test_writing_makes_the_folder_and_names_an_impossible_path(make_result, vocabulary, tmp_path):
    write_html(make_result(), tmp_path / "new" / "run.html", vocabulary=vocabulary)
    assert (tmp_path / "new" / "run.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    (tmp_path / "file").write_text("")
    with pytest.raises(JaxkvError, match="cannot write the report"):
        write_html(make_result(), tmp_path / "file" / "run.html", vocabulary=vocabulary)
