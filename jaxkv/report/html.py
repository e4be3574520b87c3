"""A run as one HTML file that needs nothing else: no script, no font, no picture from elsewhere."""

import os
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from jaxkv.errors import JaxkvError
from jaxkv.report.terminal import UNCALIBRATED
from jaxkv.report.view import (
    action_counts,
    answer_tokens,
    calls_json,
    human_bits,
    prompt_tokens,
    ratios,
)
from jaxkv.state.actions import ACTION_NAMES
from jaxkv.versions import versions

if TYPE_CHECKING:
    from jaxkv.engine.result import GenerationResult


@cache
def _template() -> jinja2.Template:
    source = resources.files("jaxkv.report").joinpath("run.html.jinja").read_text(encoding="utf-8")
    # Everything a model, a tool or a question wrote is text: autoescape is for the whole template, with no exception.
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(source)


def render_html(
    result: "GenerationResult",
    *,
    vocabulary: Any = None,
    model: str = "",
    title: str = "jaxkv run",
) -> str:
    """The page: calls, costs with their definitions, and the token by layer-group map of answer and prompt.

    Args:
        result: one generation.
        vocabulary: names of the tags; by default the function-call vocabulary.
        model: the model's name, shown when given.
        title: the page's title.
    """
    groups = tuple(result.groups)
    prompt = prompt_tokens(result)
    answer = answer_tokens(result, vocabulary)
    return _template().render(
        title=title,
        model=model,
        result=result,
        groups=groups,
        action_names=ACTION_NAMES,
        warning="" if result.calibrated else UNCALIBRATED,
        calls=calls_json(result, indent=2),
        ratios=ratios(result.cost),
        human_bits=human_bits,
        parts=[
            ("Answer", answer, action_counts(answer, groups)),
            ("Prompt", prompt, action_counts(prompt, groups)),
        ],
        versions=versions(),
    )


def write_html(result: "GenerationResult", path: str | os.PathLike, **options: Any) -> None:
    """Write `render_html(result, **options)` to a file; its folder is made.

    Raises:
        JaxkvError: the file cannot be written.
    """
    path = Path(path)
    page = render_html(result, **options)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise JaxkvError(f"cannot write the report {path}: {error.strerror}; choose another path") from error
