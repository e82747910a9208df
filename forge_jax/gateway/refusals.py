"""Tool calls that can be read, and that no offered tool takes.

The calls of a reply and the tools it was offered come in, a count comes out. Nothing here is an
error: what a tool makes of such a call is its own business, and its schema may be wrong.
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator, SchemaError, validators
from referencing import Registry
from referencing.exceptions import Unresolvable

from forge_jax.gateway.messages import ToolCall

Tools = Sequence[Mapping[str, Any]]  # OpenAI shape


def refused(calls: Sequence[ToolCall], tools: Tools) -> int:
    """How many of `calls` name no function of `tools`, or break the schema of its parameters.

    Regular expressions of a schema are not looked at: some take forever.
    """
    functions = [tool["function"] for tool in tools if tool.get("type") == "function"]
    schemas = {one["name"]: one.get("parameters") for one in functions}
    return sum(call.name not in schemas or not _fits(call, schemas[call.name]) for call in calls)


def _fits(call: ToolCall, schema: Any) -> bool:
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return False
    return schema is None or _accepts(json.dumps(schema, sort_keys=True), arguments)


def _accepts(schema: str, arguments: Any) -> bool:
    try:
        return bool(_validator(schema).is_valid(arguments))
    except (SchemaError, Unresolvable, RecursionError):
        return True  # it cannot be told


@functools.lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    parsed = json.loads(schema)
    Draft202012Validator.check_schema(parsed)
    return _Checker(parsed, registry=Registry())  # which fetches nothing


def _unchecked(*_: Any) -> Iterator[Any]:
    return iter(())


_Checker = validators.extend(
    Draft202012Validator, {"pattern": _unchecked, "patternProperties": _unchecked}
)
