"""Rules of calls that are tags with arguments as text between them.

Tools and their schemas flow in, rules flow out. Parameters come in the order of the schema, those
that are not required may be missing. A value of free text is any text without the tag that ends
it; of a value that is listed or no text, the rules let nothing else through.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from forge_jax.gateway.errors import ApiError
from forge_jax.gateway.parsers.tagged import Tags
from forge_jax.gateway.parsers.typed import (
    UNIONS,
    Tool,
    constants_of,
    kinds_of,
    properties_of,
    resolved,
)

# As chat templates write arguments.
SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
SHARED = ("$defs", "definitions")  # parts of a schema that its parameters may refer to


def tagged_bodies(
    tools: Sequence[Tool], schemas: Sequence[Mapping[str, Any] | None], tags: Tags
) -> list[str]:
    """The rule `one`, a call behind the opening tag; a schema that is None binds no arguments."""
    rules = ["one: " + " | ".join(f"tool_{i}" for i in range(len(tools)))]
    rules += _text_rules(tags)
    for i, (tool, schema) in enumerate(zip(tools, schemas, strict=True)):
        name = _written(tool["function"]["name"], tags)
        parameters = ["any*"]
        if schema is not None:
            parameters, more = _parameters(tool, schema, tags, f"value_{i}")
            rules += more
        begin = quoted(f"{tags.call}{name}{tags.name_end}\n")
        rules.append(f"tool_{i}: {begin} {' '.join(parameters)} {quoted(tags.call_end + chr(10))}")
    return rules


def _text_rules(tags: Tags) -> list[str]:
    """A parameter of any name, and the value of free text."""
    begin, end = quoted(tags.parameter), quoted(f"{tags.name_end}{tags.line}")
    # Words that end a call end a broken one where a value goes on.
    broken = [re.escape(tag).replace("/", "\\/") for tag in (tags.call_end, tags.close)]
    return [
        f"any: {begin} NAME {end} text",
        r'NAME: /[^">\n]+/',
        f"text: words {quoted(chr(10))}",
        f"words[lazy]: WORDS {quoted(tags.parameter_end)}",
        f"WORDS: /(.|\\n)*/ & ~/(.|\\n)*{broken[0]}\\s*{broken[1]}(.|\\n)*/",
    ]


def _parameters(
    tool: Tool, schema: Mapping[str, Any], tags: Tags, prefix: str
) -> tuple[list[str], list[str]]:
    """The parameters of a tool as a rule has them, and the rules of their values."""
    whole = resolved(schema, schema)
    properties = properties_of(whole)
    if not properties:
        closed = isinstance(whole, dict) and whole.get("additionalProperties") is False
        unions = isinstance(whole, dict) and any(union in whole for union in UNIONS)
        if unions and tool["function"].get("strict") is True:
            message = f"tools: {tool['function']['name']!r} cannot be strict: its parameters have"
            raise ApiError(400, f"{message} no properties at their top", param="tools")
        return ([] if closed else ["any*"]), []
    required = whole.get("required")
    required = required if isinstance(required, list) else []
    parameters, rules = [], []
    for j, (key, value) in enumerate(properties.items()):
        begin = f"{tags.parameter}{_written(key, tags)}{tags.name_end}{tags.line}"
        written = f"({quoted(begin)} {prefix}_{j})"
        parameters.append(written if key in required else f"{written}?")
        rules.append(f"{prefix}_{j}: {_value(value, schema, tags)}")
    return parameters, rules


def _value(schema: Any, whole: Mapping[str, Any], tags: Tags) -> str:
    """A value and the tag behind it."""
    kinds = kinds_of(schema, whole)
    found = resolved(schema, whole)
    end = quoted(f"{tags.line}{tags.parameter_end}\n")
    constants = constants_of(found) if isinstance(found, dict) else ()
    if constants:
        texts = [one if isinstance(one, str) else json.dumps(one) for one in constants]
        return f"({' | '.join(map(quoted, texts))}) {end}"
    if not kinds or "string" in kinds:
        return "text"
    shared = {key: whole[key] for key in SHARED if key in whole}
    written = json.dumps({"x-guidance": SPACED, **shared, **found})
    return f"%json {written} {end}"


def _written(name: str, tags: Tags) -> str:
    if tags.name_end in name or "\n" in name or not name:
        message = f"tools: the model's tool format cannot write the name {name!r}"
        raise ApiError(400, message, param="tools")
    return name


def quoted(text: str) -> str:
    """`text` as the rules quote it."""
    return json.dumps(text, ensure_ascii=False)
