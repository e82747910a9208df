"""Values of arguments that a model wrote as plain text, typed by the tool's JSON schema.

Text and schemas flow in, JSON values flow out. A text that is no value of its schema's types
stays a text, so nothing the model wrote is lost.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from forge_jax.gateway.parsers.protocol import DECODER

Tool = Mapping[str, Any]
DEPTH = 8  # of references and alternatives that are followed
WORDS = {"true": True, "false": False, "null": None, "none": None}  # however they are capitalised
NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
         dict: "object", type(None): "null"}  # fmt: skip
UNIONS = ("anyOf", "oneOf", "allOf")


def schemas_of(tools: Sequence[Tool], name: str) -> tuple[Mapping[str, Any], Any]:
    """Schemas of a function's parameters by name, and the schema that they refer into."""
    for tool in tools:
        if tool["function"]["name"] == name:
            whole = tool["function"].get("parameters")
            return properties_of(whole), whole
    return {}, None


def properties_of(schema: Any) -> Mapping[str, Any]:
    """The properties that a schema names."""
    found = schema.get("properties") if isinstance(schema, dict) else None
    return found if isinstance(found, dict) else {}


def typed(text: str, schema: Any, whole: Any) -> Any:
    """The value that `text` is of a parameter; `whole` has what the schema refers to."""
    kinds = kinds_of(schema, whole)
    if not kinds - {"string"}:
        return text
    word = text.strip().lower()
    try:
        value: Any = WORDS[word] if word in WORDS else DECODER.decode(text.strip())
    except (ValueError, RecursionError):
        return text
    kind = NAMES[type(value)]
    if kind == "string" and "string" in kinds:
        return text  # its quotes are part of it
    whole_number = kind == "number" and value.is_integer()
    fits = {kind} | ({"number"} if kind == "integer" else set())
    fits |= {"integer"} if whole_number else set()
    return value if fits & kinds else text


def kinds_of(schema: Any, whole: Any, depth: int = DEPTH) -> frozenset[str]:
    """The JSON types that a schema names; none where it allows every value."""
    schema = resolved(schema, whole)
    if not isinstance(schema, dict) or depth == 0:
        return frozenset()
    kind = schema.get("type")
    kinds = {kind} if isinstance(kind, str) else set()
    kinds |= {one for one in kind if isinstance(one, str)} if isinstance(kind, list) else set()
    if not kinds:
        kinds = {NAMES[type(value)] for value in constants_of(schema)}
    if not kinds:
        for union in UNIONS:
            parts = schema.get(union)
            for part in parts if isinstance(parts, list) else []:
                kinds |= kinds_of(part, whole, depth - 1)
    return frozenset(kinds)


def resolved(schema: Any, whole: Any) -> Any:
    """A schema, or the one in `whole` that it refers to."""
    for _ in range(DEPTH):
        place = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(place, str) or not place.startswith("#"):
            break
        schema = whole
        for key in place[1:].split("/")[1:]:
            schema = schema.get(key) if isinstance(schema, dict) else None
    return schema


def constants_of(schema: Mapping[str, Any]) -> tuple[Any, ...]:
    """The only values that a schema allows, () where it does not list them."""
    if "const" in schema:
        return (schema["const"],)
    listed = schema.get("enum")
    return tuple(listed) if isinstance(listed, list) else ()
