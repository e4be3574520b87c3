"""Generate function calls from a tools file and a conversation, and show what the KV policy kept.

    python scripts/generate.py --tools examples/tools.json --messages examples/messages.json --html run.html

The last line of standard output is the calls as JSON: of one conversation its list of calls, of several a list of such
lists. A bad input is one line on standard error and exit code 2, before any model is loaded.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import tyro
from rich.console import Console

from jaxkv.errors import RequestError
from jaxkv.evaluation.figures import run_record, run_script


@dataclasses.dataclass(frozen=True)
class Arguments:
    tools: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """JSON list of function documents (OpenAI's, BFCL's, or plain ones)."""
    messages: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """JSON list of messages with role and content, or a list of such conversations."""
    model: str = "smollm2-135m"
    """Model name, Hugging Face folder or hub id."""
    policy: str = "structural-prior"
    """Policy name, or the path of a policy file."""
    transfer: bool = False
    """Use a policy that was made for another model."""
    batch: int = 1
    """Rows that are generated together. A single conversation is repeated to fill them."""
    parallel: bool = False
    """Ask for a list of calls rather than one call."""
    max_new_tokens: int = 160
    """Longest answer in tokens."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Nucleus of the sampling distribution."""
    seed: int = 0
    """Seed of the sampling."""
    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the token by layer-group map as an HTML page (of several conversations, the first)."""
    run_json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write versions, configuration, seed and figures."""
    profile: bool = False
    """Print what the host's part of a decode step costs."""
    stream: bool = False
    """Print the answer's text as it is generated."""


RATIOS = ("ratio_total", "ratio_prefill", "ratio_decode", "ratio_live")


def read_json(path: Path, what: str) -> Any:
    """The value of a JSON file; errors name the file and the position."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"cannot read the {what} file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"the {what} file {path} is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise RequestError(
            f"the {what} file {path} is not JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error


def read_conversations(path: Path) -> list[list[dict[str, str]]]:
    """One conversation or several, each a list of messages with role and content."""
    value = read_json(path, "messages")
    if not isinstance(value, list) or not value:
        raise RequestError(f"the messages file {path} holds no list of messages; write [{{role, content}}, ...]")
    conversations = value if isinstance(value[0], list) else [value]
    for number, conversation in enumerate(conversations):
        if not isinstance(conversation, list) or not conversation:
            raise RequestError(
                f"conversation {number} of {path} is not a list of messages; write [{{role, content}}, ...]"
            )
        for position, message in enumerate(conversation):
            if not (
                isinstance(message, dict)
                and message.get("role") in ("system", "user", "assistant", "tool")
                and isinstance(message.get("content"), str)
            ):
                raise RequestError(
                    f"message {position} of conversation {number} of {path} is {json.dumps(message)[:80]}; it needs a "
                    "role (system, user, assistant or tool) and a text content"
                )
    return conversations


def check_numbers(arguments: Arguments) -> None:
    """Every number within its limits, before any work."""
    for name, minimum in (("batch", 1), ("max_new_tokens", 1), ("temperature", 0)):
        value = getattr(arguments, name)
        if not value >= minimum:
            raise RequestError(f"--{name.replace('_', '-')} {value} is below {minimum}; give at least {minimum}")
    if not 0 < arguments.top_p <= 1:
        raise RequestError(f"--top-p {arguments.top_p} is outside (0, 1]; give 1 for the whole distribution")


def main(arguments: Arguments) -> int:
    check_numbers(arguments)
    tools = read_json(arguments.tools, "tools")
    conversations = read_conversations(arguments.messages)

    from jaxkv.grammar.schema import read_tools
    from jaxkv.policies.registry import load_policy
    from jaxkv.prompting import tool_messages

    read_tools(tools)
    load_policy(arguments.policy, transfer=arguments.transfer)
    prompts = [tool_messages(tools, conversation, parallel=arguments.parallel) for conversation in conversations]
    if len(prompts) == 1:
        prompts *= arguments.batch

    from jaxkv.engine import Engine, Request
    from jaxkv.grammar.function_calling import FunctionCalls
    from jaxkv.models.loading import load_model
    from jaxkv.report.html import write_html
    from jaxkv.report.terminal import print_run

    model = load_model(arguments.model)
    policy = load_policy(arguments.policy, model, transfer=arguments.transfer)
    calls = FunctionCalls(tools, model.tokenizer, parallel=arguments.parallel)
    engine = Engine(model, policy, rows=arguments.batch, profile=arguments.profile)
    requests = [
        Request(
            request_id=str(number),
            messages=prompt,
            constraint=calls,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            seed=arguments.seed + number,
        )
        for number, prompt in enumerate(prompts)
    ]
    console = Console(highlight=False)
    results = sorted(
        engine.run(requests, stream_to(console) if arguments.stream else None),
        key=lambda result: int(result.request_id),
    )
    if arguments.stream:
        console.print()
    for result in results:
        if len(results) > 1:
            console.rule(f"conversation {result.request_id}")
        print_run(result, console)
    if arguments.profile:
        print_profile(engine.step_times, console)
    if arguments.html is not None:
        write_html(results[0], arguments.html, model=model.name)
        console.print(f"report: {arguments.html}", markup=False, soft_wrap=True)
    if arguments.run_json is not None:
        total = sum((result.cost for result in results[1:]), results[0].cost)
        figures: dict[str, Any] = {name: getattr(total, name) for name in RATIOS}
        figures["calibrated"] = policy.calibrated
        run_record(arguments.run_json, arguments, figures, seeds=[request.seed for request in requests])
    answers = [result.calls for result in results]
    print(json.dumps(answers if len(answers) > 1 else answers[0], ensure_ascii=False))
    return 1 if any(result.finish_reason == "error" for result in results) else 0


def stream_to(console: Console) -> Callable[[str, Any], None]:
    """Prints the text of the first conversation's tokens as they come."""

    def show(request_id: str, token: Any) -> None:
        if request_id == "0":
            console.print(token.text, end="", markup=False, soft_wrap=True)

    return show


def print_profile(steps: Sequence[Any], console: Console) -> None:
    """Median milliseconds of each part of a decode step, and what structure costs of it.

    The parts are timed with the device idle around each, so a step without `--profile`, where the host's part hides
    behind the device's, is shorter. Steps that compile do not move a median.
    """
    steps = steps[1:]
    if not steps:
        console.print("profile: the answer is too short to time a step")
        return
    parts = {
        name: 1000 * median(getattr(step, name) for step in steps)
        for name in ("forward", "grammar", "policy", "sampling")
    }
    step = parts["forward"] + parts["grammar"] + parts["sampling"]
    structure = parts["grammar"] + parts["policy"]
    console.print(f"decode step, median of {len(steps)}: {step:.2f} ms")
    console.print(f"  forward pass              {parts['forward']:8.2f} ms")
    console.print(f"  grammar: accept, tags, mask {parts['grammar']:6.2f} ms")
    console.print(f"  policy step and sampling  {parts['sampling']:8.2f} ms, of it the policy {parts['policy']:.2f} ms")
    console.print(f"  grammar and policy        {structure / step:8.1%} of the step")


def cli(arguments: Sequence[str] | None = None) -> int:
    """Run the script with these command-line arguments, by default the process's; gives the exit code."""
    parsed = tyro.cli(Arguments, description=__doc__, args=arguments)
    return run_script(lambda: main(parsed))


if __name__ == "__main__":
    sys.exit(cli())
