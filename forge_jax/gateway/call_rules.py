"""Rules of tool calls, one set for each tool format, in llguidance's dialect of Lark.

Tools flow in, rules flow out: `calls` is one call or, where several may come at once, more of
them. Formats that carry arguments as text bind their names, their order and the values that are
no free text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from forge_jax.gateway.errors import ApiError
from forge_jax.gateway.parsers import hermes
from forge_jax.gateway.parsers.lookup import BETWEEN, first_parameter
from forge_jax.gateway.parsers.tagged import MINIMAX, QWEN3_CODER, Tags
from forge_jax.gateway.parsers.typed import Tool
from forge_jax.gateway.tag_rules import SPACED, quoted, tagged_bodies

ARGUMENTS = {"hermes": "arguments", "json": "arguments", "llama3": "parameters"}
TAGS = {"qwen3_coder": QWEN3_CODER, "minimax": MINIMAX}
BRACES = {"llama3": "{", "json": "{[`"}  # with which a line of calls begins


def strict(tool: Tool) -> bool:
    """Whether calls of a tool have to follow its schema, asked for or not."""
    return tool["function"].get("strict") is True


def calls(tools: Sequence[Tool], form: str, parallel: bool) -> list[str]:
    """The rules of replies that are calls and nothing else. Raises ApiError(400)."""
    if form == "lookup" and len(tools) > 1:
        names = " | ".join(quoted(tool["function"]["name"]) for tool in tools)
        more = f" ({quoted(BETWEEN)} call)*" if parallel else ""
        return [
            f"calls: call{more}",
            "call: " + quoted("?") + " name VALUES?",
            f"name: {names}",
            "VALUES: /( [^ \\t\\n]+)+/",
        ]
    if form == "lookup":
        function = tools[0]["function"]
        if first_parameter(function) is None:
            message = f"tools: {function['name']!r} takes no parameter to look up"
            raise ApiError(400, message, param="tools")
        return [
            "calls: /[?][^\\t\\n]+(\\t[?][^\\t\\n]+)*/" if parallel else "calls: /[?][^\\t\\n]+/"
        ]
    if form in BRACES:
        return [_listed(form, parallel), *_objects(tools, form, False)]
    open_tag = TAGS[form].open if form in TAGS else hermes.OPEN
    bodies = _tagged(tools, form, parallel, False)
    more = f" ({quoted(chr(10))} call)*" if parallel and form != "minimax" else ""
    return [f"calls: call{more}", f"call: {quoted(open_tag)} body", *bodies]


def free(tools: Sequence[Tool], form: str, parallel: bool, apart: str) -> list[str]:
    """The rules of replies of any text, but for the calls in it. Raises ApiError(400).

    No text begins with `apart`, which begins what rules before these are for; "" is no such.
    """
    other = f" & ~/{apart}(.|\\n)*/" if apart else ""
    if form in BRACES:
        first, later = f"{BRACES[form]}\\s", f"{BRACES[form]}\\n"
        text = rf"TEXT: /\s*[^{first}][^\n]*(\n([^{later}][^\n]*)?)*/{other}"
        head = ["start: TEXT? calls?", text.replace("[^{[", "[^{\\["), _listed(form, parallel)]
        return [*head, *_objects(tools, form, True)]
    open_tag = TAGS[form].open if form in TAGS else hermes.OPEN
    head = ["start: call* TEXT", f"TEXT: /(.|\\n)*/{other}", f"head[lazy]: TEXT {quoted(open_tag)}"]
    return [*head, "call: head body", *_tagged(tools, form, parallel, True)]


def answer_or_call(
    answer: Mapping[str, Any], tools: Sequence[Tool], form: str, parallel: bool
) -> Mapping[str, Any]:
    """A schema of an answer and of calls that are JSON as well. Raises ApiError(400)."""
    found = []
    definitions = {"answer": _moved(answer, "answer")}
    for i, tool in enumerate(tools):
        definitions[f"tool_{i}"] = _moved(_schema(tool), f"tool_{i}")
        properties = {
            "name": {"const": tool["function"]["name"]},
            ARGUMENTS[form]: {"$ref": f"#/$defs/tool_{i}"},
        }
        found.append(
            {
                "type": "object",
                "properties": properties,
                "required": [*properties],
                "additionalProperties": False,
            }
        )
    several = [{"type": "array", "items": {"anyOf": found}, "minItems": 1}]
    anything = [{"$ref": "#/$defs/answer"}, *found]
    anything += several if parallel and form == "json" else []
    return {"anyOf": anything, "$defs": definitions}


def _listed(form: str, parallel: bool) -> str:
    """The rule `calls` of a format of plain objects."""
    if not parallel:
        return "calls: call"
    if form == "llama3":
        return f"calls: call ({quoted('; ')} call)*"
    return f"calls: call | {quoted('[')} call ({quoted(', ')} call)* {quoted(']')}"


def _objects(tools: Sequence[Tool], form: str, lenient: bool) -> list[str]:
    """The rule `call`, a JSON object; where `lenient` arguments of tools that are not strict are
    any object."""
    rules = ["call: " + " | ".join(f"tool_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        schema = {} if lenient and not strict(tool) else _schema(tool)
        written = json.dumps({"x-guidance": SPACED, **schema, "type": "object"})
        name = json.dumps(tool["function"]["name"], ensure_ascii=False)
        begin = quoted(f'{{"name": {name}, "{ARGUMENTS[form]}": ')
        rules += [f"tool_{i}: {begin} arguments_{i} {quoted('}')}"]
        rules += [f"arguments_{i}: %json {written}"]
    return rules


def _tagged(tools: Sequence[Tool], form: str, parallel: bool, lenient: bool) -> list[str]:
    """The rule `body`: what follows the opening tag of a call."""
    if form == "hermes":
        objects = _objects(tools, form, lenient)
        return [f"body: {quoted(chr(10))} one {quoted(chr(10) + hermes.CLOSE)}",
                objects[0].replace("call:", "one:"), *objects[1:]]  # fmt: skip
    tags: Tags = TAGS[form]
    # Each ends its own line: words of which one begins another would hide it.
    several = "+" if parallel and form == "minimax" else ""
    rules = [f"body: {quoted(chr(10))} one{several} {quoted(tags.close)}"]
    bound = [_schema(tool) if strict(tool) or not lenient else None for tool in tools]
    return [*rules, *tagged_bodies(tools, bound, tags)]


def _schema(tool: Tool) -> dict[str, Any]:
    schema = tool["function"].get("parameters") or {}
    if not isinstance(schema, dict):
        message = f"tools: parameters of {tool['function']['name']!r} must be a JSON schema"
        raise ApiError(400, message, param="tools")
    return schema


def _moved(schema: Any, name: str) -> Any:
    """A schema as it stands in the definitions of another, references to itself included."""
    if isinstance(schema, list):
        return [_moved(one, name) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, name) for key, value in schema.items()}
    place = schema.get("$ref")
    if isinstance(place, str) and place.startswith("#"):
        moved["$ref"] = f"#/$defs/{name}{place[1:]}"
    return moved
