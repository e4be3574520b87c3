"""How a conversation with functions on offer is put to a model whose chat template knows no tools.

The wording is the one that the BFCL figures of `scripts/evaluate.py` are measured with.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from jaxkv.errors import RequestError

TYPE_MAPPING: Final[dict[str, str | None]] = {
    "dict": "object",
    "float": "number",
    "tuple": "array",
    "any": None,
}
"""BFCL's Python type names that JSON Schema lacks, and its name for each; None leaves the value unconstrained."""

SYSTEM_PROMPT: Final = (
    "You are a function calling assistant. Given the available functions and a question, reply with only one JSON "
    'object {"name": function name, "arguments": {parameter: value}} using values taken from the question. '
    "Leave out optional parameters that the question does not mention."
)
PARALLEL_SYSTEM_PROMPT: Final = (
    "You are a function calling assistant. Given the available functions and a question, reply with only a JSON "
    'list of objects {"name": function name, "arguments": {parameter: value}} using values taken from the question. '
    "Leave out optional parameters that the question does not mention."
)


def tool_messages(
    tools: Iterable[Mapping[str, Any]], messages: Sequence[Mapping[str, str]], *, parallel: bool = False
) -> list[dict[str, str]]:
    """Describe functions inside a conversation.

    The system message says what to reply, then what the conversation's own system messages say, each after an empty
    line. The first user message becomes `Functions:`, one line of JSON a function (`describe_tool`), an empty line,
    `Question: ` and its text. Other messages stay as they are.

    Args:
        tools: BFCL's or OpenAI's function documents.
        messages: `role` and `content` each.
        parallel: ask for a list of calls rather than one call.

    Raises:
        RequestError: no message is the user's.
    """
    instructions = [message["content"] for message in messages if message["role"] == "system"]
    turns = [dict(message) for message in messages if message["role"] != "system"]
    first = next((turn for turn in turns if turn["role"] == "user"), None)
    if first is None:
        raise RequestError(f"none of the {len(messages)} messages has the role 'user'; add the user's question")
    lines = ["Functions:", *(json.dumps(describe_tool(tool), ensure_ascii=False) for tool in tools)]
    first["content"] = "\n".join([*lines, "", f"Question: {first['content']}"])
    system = "\n\n".join([PARALLEL_SYSTEM_PROMPT if parallel else SYSTEM_PROMPT, *instructions])
    return [{"role": "system", "content": system}, *turns]


def describe_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The short form of a function document in the prompt.

    `{"name", "description", "parameters": {parameter: {"type", "description", "enum"}}, "required"}`; what a
    parameter does not declare is left out, types carry their JSON-Schema names, nested properties are not shown.
    """
    function = tool.get("function", tool)
    schema = function.get("parameters") or {}
    parameters = {}
    for name, declared in schema.get("properties", {}).items():
        shown = {"type": json_type(declared)} | {key: declared.get(key) for key in ("description", "enum")}
        parameters[name] = {key: value for key, value in shown.items() if value is not None}
    return {
        "name": function["name"],
        "description": function.get("description", ""),
        "parameters": parameters,
        "required": list(schema.get("required", [])),
    }


def json_type(declared: Mapping[str, Any]) -> Any:
    """The JSON-Schema type of a declaration; None where it constrains nothing."""
    kind = declared.get("type")
    return TYPE_MAPPING.get(kind, kind) if isinstance(kind, str) else kind
