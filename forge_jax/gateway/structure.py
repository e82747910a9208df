"""The form a client wants its answer in, as OpenAI and vLLM spell that.

A body flows in; the grammar of the answer, or none, flows out. Whether a grammar can be followed
is for the engine to say; here it is only read.
"""

import json
from collections.abc import Mapping
from typing import Any

from forge_jax.drawing import CHOICE, GRAMMAR, JSON_SCHEMA, REGEX, Grammar
from forge_jax.gateway.errors import ApiError
from forge_jax.gateway.fields import flag, mapping, shown, strings, text, wrong

RESPONSE_FORMAT, TEXT_FORMAT = "response_format", "text.format"
OUTPUT_FORMAT = "output_config.format"
# Those that leave the model free to call a tool instead.
FORMATS = (RESPONSE_FORMAT, TEXT_FORMAT, OUTPUT_FORMAT)
MOST_CHOICES = 4096
ANY_OBJECT = {"type": "object"}


def read_grammar(body: Mapping[str, Any]) -> Grammar | None:
    """What the answer belongs to. Raises ApiError(400), also where a body says it twice."""
    outputs = mapping(body, "structured_outputs")
    known = (*_READ, "json_object")
    for name, value in outputs.items():
        if name not in known and value not in (None, False):
            path = f"structured_outputs.{name}"
            raise ApiError(400, f"{path} is none of {', '.join(known)}", param=path)
    found = [_response_format(body)]
    found += [_guided(body, name, f"guided_{name}") for name in _READ]
    found += [_guided(outputs, name, name, "structured_outputs.") for name in _READ]
    if flag(outputs, "json_object", "structured_outputs."):
        found.append(schema_grammar(ANY_OBJECT, "structured_outputs.json_object"))
    said = [grammar for grammar in found if grammar is not None]
    if len(said) > 1:
        first, second = said[0].source, said[1].source
        raise ApiError(400, f"{second} does not go with {first}", param=second)
    return said[0] if said else None


def schema_of(grammar: Grammar | None) -> Mapping[str, Any] | None:
    """The JSON schema of an answer, where it has one."""
    if grammar is None or grammar.kind != JSON_SCHEMA:
        return None
    return json.loads(grammar.text)


def _response_format(body: Mapping[str, Any]) -> Grammar | None:
    wanted = mapping(body, RESPONSE_FORMAT)
    kind = text(wanted, "type", f"{RESPONSE_FORMAT}.")
    if not wanted or kind == "text":
        return None
    if kind == "json_object":
        return schema_grammar(ANY_OBJECT, RESPONSE_FORMAT)
    if kind != "json_schema":
        raise wrong(f"{RESPONSE_FORMAT}.type", kind, "text, json_object or json_schema")
    path = f"{RESPONSE_FORMAT}.json_schema"
    holder = mapping(wanted, "json_schema", f"{RESPONSE_FORMAT}.")
    if holder.get("schema") is None:
        raise wrong(f"{path}.schema", None, "a JSON schema")
    return schema_grammar(mapping(holder, "schema", f"{path}."), RESPONSE_FORMAT)


def _guided(body: Mapping[str, Any], kind: str, name: str, path: str = "") -> Grammar | None:
    if body.get(name) is None:
        return None
    return _READ[kind](body, name, path)


def _schema(body: Mapping[str, Any], name: str, path: str) -> Grammar:
    value = body[name]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"{path}{name} is not JSON: {error}", param=path + name) from None
    if not isinstance(value, dict):
        raise wrong(path + name, value, "a JSON schema, an object or its text")
    return schema_grammar(value, path + name)


def schema_grammar(schema: Mapping[str, Any], source: str) -> Grammar:
    """The JSON texts of a schema, as the field `source` asks for them."""
    try:
        written = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise ApiError(400, f"{source} has a number that is no JSON", param=source) from None
    return _grammar(JSON_SCHEMA, written, source)


def _choice(body: Mapping[str, Any], name: str, path: str) -> Grammar:
    if not isinstance(body[name], list) or not body[name]:
        raise wrong(path + name, body[name], "a list of texts, not empty")
    choices = strings(body, name, MOST_CHOICES, path)
    return _grammar(CHOICE, json.dumps(choices, ensure_ascii=False), path + name)


def _regex(body: Mapping[str, Any], name: str, path: str) -> Grammar:
    return _grammar(REGEX, text(body, name, path) or "", path + name)


def _rules(body: Mapping[str, Any], name: str, path: str) -> Grammar:
    return _grammar(GRAMMAR, text(body, name, path) or "", path + name)


def _grammar(kind: str, written: str, source: str) -> Grammar:
    try:
        written.encode()
    except UnicodeEncodeError:
        raise ApiError(400, f"{source}={shown(written)} is no text", param=source) from None
    return Grammar(kind=kind, text=written, source=source)


_READ = {JSON_SCHEMA: _schema, REGEX: _regex, CHOICE: _choice, GRAMMAR: _rules}
