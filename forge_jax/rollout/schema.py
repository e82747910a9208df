"""The smallest JSON value that a JSON schema accepts.

A schema flows in, a value flows out. It covers what tool and response schemas are made of;
a schema it cannot satisfy is an error, never a value that does not fit.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

DEPTH = 64  # nesting beyond which a schema is taken to require itself
UNSUPPORTED = {"not", "if", "contains", "pattern", "dependentRequired", "dependentSchemas"}
FORMATS = {
    "date": "2000-01-01",
    "date-time": "2000-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "email": "a@b.co",
    "uri": "http://a",
    "uuid": "00000000-0000-0000-0000-000000000000",
    "ipv4": "0.0.0.0",
}


def minimal(schema: Mapping[str, Any] | bool) -> Any:
    """A minimal JSON value valid for `schema`: only what is required, shortest and least.

    Understands const, enum, type, properties, required, items, prefixItems, anyOf, oneOf,
    allOf, local $ref, bounds on lengths, items and numbers, multipleOf and common formats.
    Raises ValueError on a schema that needs anything else, or itself without end.
    """
    return _value(schema, schema, 0)


def _value(schema: Any, root: Any, depth: int) -> Any:
    if depth > DEPTH:
        raise ValueError("the schema requires itself without end")
    if isinstance(schema, bool):
        schema = _merge([schema])
    schema = _resolved(schema, root)
    unmet = UNSUPPORTED & schema.keys()
    if unmet:
        raise ValueError(f"{sorted(unmet)[0]} is not supported in a schema")
    if "allOf" in schema:
        rest = {key: value for key, value in schema.items() if key != "allOf"}
        parts = [_resolved(part, root) for part in schema["allOf"]]
        return _value(_merge([*parts, rest]), root, depth + 1)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return _choice(key, schema, root, depth)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    return _typed(schema, root, depth)


def _choice(key: str, schema: Mapping[str, Any], root: Any, depth: int) -> Any:
    """The value of the first alternative that has one: a recursive one may not."""
    rest = {name: value for name, value in schema.items() if name != key}
    problem = ValueError(f"{key} has no alternatives")
    for option in schema[key]:
        try:
            return _value(_merge([rest, _resolved(option, root)]), root, depth + 1)
        except ValueError as error:
            problem = error
    raise problem


def _typed(schema: Mapping[str, Any], root: Any, depth: int) -> Any:
    kind = schema.get("type") or _implied(schema)
    if isinstance(kind, list):
        kind = kind[0]
    match kind:
        case "object":
            return _object(schema, root, depth)
        case "array":
            return _array(schema, root, depth)
        case "string":
            return _string(schema)
        case "integer" | "number":
            return _number(schema, kind)
        case "boolean":
            return False
        case "null":
            return None
    raise ValueError(f"unknown type {kind!r} in a schema")


def _object(schema: Mapping[str, Any], root: Any, depth: int) -> dict[str, Any]:
    properties = schema.get("properties", {})
    names = dict.fromkeys([*schema.get("required", ()), *properties])
    count = max(len(set(schema.get("required", ()))), schema.get("minProperties", 0))
    if len(names) < count:
        raise ValueError(f"minProperties={count}, but only {len(names)} are named")
    return {name: _value(properties.get(name, {}), root, depth + 1) for name in list(names)[:count]}


def _array(schema: Mapping[str, Any], root: Any, depth: int) -> list[Any]:
    count = schema.get("minItems", 0)
    first = list(schema.get("prefixItems", ()))[:count]
    kinds = [*first, *[schema.get("items", {})] * (count - len(first))]
    items = [_value(kind, root, depth + 1) for kind in kinds]
    if schema.get("uniqueItems") and any(item in items[:i] for i, item in enumerate(items)):
        raise ValueError(f"uniqueItems with minItems={count} is not supported")
    return items


def _implied(schema: Mapping[str, Any]) -> str:
    """The type a schema without one is about."""
    signs = {
        "array": ("items", "prefixItems", "minItems"),
        "string": ("minLength", "pattern", "format"),
        "number": ("minimum", "exclusiveMinimum", "multipleOf"),
    }
    return next((t for t, keys in signs.items() if any(k in schema for k in keys)), "object")


def _string(schema: Mapping[str, Any]) -> str:
    text = FORMATS.get(schema.get("format", ""), "")  # of other formats any string will do
    return text + "a" * (schema.get("minLength", 0) - len(text))


def _number(schema: Mapping[str, Any], kind: str) -> int | float:
    step = schema.get("multipleOf", 1 if kind == "integer" else 0)
    low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    above = schema.get("exclusiveMinimum", -math.inf)
    below = schema.get("exclusiveMaximum", math.inf)
    floor, ceiling = max(low, above), min(high, below)
    near = (0, floor, floor + (step or 1), ceiling, ceiling - (step or 1), (floor + ceiling) / 2)
    for value in filter(math.isfinite, near):
        multiples = (math.ceil(value / step) * step, value // step * step) if step else (value,)
        for multiple in multiples:
            whole = multiple == int(multiple)
            if low <= multiple <= high and above < multiple < below and (whole or kind == "number"):
                return int(multiple) if whole else multiple
    raise ValueError(f"no {kind} fits the bounds of {dict(schema)!r}")


def _follow(reference: str, root: Any) -> Mapping[str, Any]:
    """What a local reference ("#", "#/$defs/name") points to."""
    if not reference.startswith("#"):
        raise ValueError(f"$ref={reference!r} is not local")
    found = root
    for part in reference.lstrip("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or name not in found:
            raise ValueError(f"$ref={reference!r} points nowhere")
        found = found[name]
    return found


def _resolved(schema: Any, root: Any) -> Any:
    """`schema` with the references at its top followed."""
    for _ in range(DEPTH):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        schema = _merge([_follow(schema["$ref"], root), rest])
    raise ValueError("a $ref leads back to itself")


def _merge(parts: Sequence[Any]) -> dict[str, Any]:
    """One schema that asks for what all `parts` do, where they ask for different things."""
    merged: dict[str, Any] = {}
    for part in parts:
        if part is False:
            raise ValueError("no value fits the schema False")
        part = {} if part is True else part
        properties = {**merged.get("properties", {}), **part.get("properties", {})}
        required = [*merged.get("required", ()), *part.get("required", ())]
        merged |= part
        merged |= {"properties": properties} if properties else {}
        merged |= {"required": list(dict.fromkeys(required))} if required else {}
    return merged
