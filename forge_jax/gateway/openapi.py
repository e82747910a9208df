"""What the gateway serves, as an OpenAPI document.

Nothing flows in, one JSON object flows out. It names every route, the fields of bodies that are
read with their types (others are passed over), and what every answer has.
"""

from collections.abc import Mapping
from typing import Any

from forge_jax.gateway.ask import MOST_CHOICES, MOST_STOPS
from forge_jax.gateway.fields import MOST_MESSAGES, MOST_TOOLS
from forge_jax.gateway.identity import MOST_NAME

Schema = Mapping[str, Any]


def optional(schema: Schema) -> Schema:
    """`schema`, or null, which counts as absent."""
    return {"anyOf": [schema, {"type": "null"}]}


def record(required: Mapping[str, Schema], optionals: Mapping[str, Schema] | None = None) -> Schema:
    """An object with the fields of `required`; those of `optionals` may be null or missing."""
    known = {name: optional(schema) for name, schema in (optionals or {}).items()}
    return {"type": "object", "required": list(required), "properties": {**required, **known}}


def several(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    """A list of `items`."""
    bounds = {"minItems": least} | ({} if most is None else {"maxItems": most})
    return {"type": "array", "items": items, **bounds}


TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
ANY: Schema = {}
COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
LIMIT = {**COUNT, "minimum": 1}
IDS = several(COUNT)
STOPS = {"anyOf": [{**TEXT, "minLength": 1}, several({**TEXT, "minLength": 1}, most=MOST_STOPS)]}
CONTENT = {"anyOf": [TEXT, several({"anyOf": [TEXT, OBJECT]})]}
MESSAGES = several(record({"role": TEXT}, {"content": CONTENT}), 1, MOST_MESSAGES)
TOOLS = several(OBJECT, most=MOST_TOOLS)
DRAWN = {
    "temperature": {"type": "number", "minimum": 0},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "seed": {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
    "stop_token_ids": IDS,
    "ignore_eos": FLAG,
    "stream": FLAG,
    "return_token_ids": FLAG,
}
OPENAI = {
    **DRAWN,
    "n": {**LIMIT, "maximum": MOST_CHOICES},
    "stop": STOPS,
    "stream_options": record({}, {"include_usage": FLAG}),
}
USAGE = record({"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT})
SPENT = record({"input_tokens": COUNT, "output_tokens": COUNT})
TOP = {"type": "integer", "minimum": 0, "maximum": 20}

CHAT = (
    record(
        {"messages": MESSAGES},
        {
            **OPENAI, "tools": TOOLS, "max_tokens": LIMIT, "max_completion_tokens": LIMIT,
            "logprobs": FLAG, "top_logprobs": TOP, "response_format": OBJECT,
            "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, OBJECT]},
            "parallel_tool_calls": FLAG, "chat_template_kwargs": OBJECT,
        },
    ),
    record({"id": TEXT, "object": TEXT, "model": TEXT, "created": COUNT, "usage": USAGE,
            "choices": several(record({"index": COUNT, "message": OBJECT, "finish_reason": TEXT}),
                               1)}),
)  # fmt: skip
COMPLETIONS = (
    record(
        {"prompt": {"anyOf": [TEXT, IDS, several({"anyOf": [TEXT, IDS]}, 1, 1)]}},
        {**OPENAI, "max_tokens": COUNT, "echo": FLAG, "logprobs": {"anyOf": [FLAG, TOP]}},
    ),
    record({"id": TEXT, "object": TEXT, "model": TEXT, "created": COUNT, "usage": USAGE,
            "choices": several(record({"index": COUNT, "text": TEXT, "finish_reason": TEXT}), 1)}),
)  # fmt: skip
RESPONSES = (
    record(
        {},
        {
            **DRAWN, "input": {"anyOf": [TEXT, several(OBJECT, most=MOST_MESSAGES)]},
            "instructions": TEXT, "previous_response_id": TEXT, "tools": several(OBJECT),
            "max_output_tokens": LIMIT, "store": FLAG, "text": OBJECT, "metadata": OBJECT,
            "parallel_tool_calls": FLAG, "top_logprobs": TOP, "include": several(ANY),
        },
    ),
    record({"id": TEXT, "object": TEXT, "status": TEXT, "model": TEXT, "output": several(OBJECT, 1),
            "usage": SPENT}),
)  # fmt: skip
TALK = {"system": CONTENT, "tools": TOOLS, "tool_choice": OBJECT}
ANTHROPIC = (
    record(
        {"messages": MESSAGES},
        {**DRAWN, **TALK, "max_tokens": LIMIT, "stop_sequences": STOPS, "output_config": OBJECT},
    ),
    record({"id": TEXT, "type": TEXT, "role": TEXT, "model": TEXT, "stop_reason": TEXT,
            "content": several(record({"type": TEXT}), 1), "usage": SPENT}),
)  # fmt: skip
COUNTED = (record({"messages": MESSAGES}, TALK), record({"input_tokens": COUNT}))
MODEL = record({"id": TEXT, "object": TEXT, "created": COUNT, "owned_by": TEXT})
TURN = record({
    "prompt_ids": IDS, "output_ids": IDS, "logprobs": several({"type": "number"}),
    "versions": IDS, "finish_reason": TEXT, "seconds": {"type": "number"},
}, {"parent": COUNT})  # fmt: skip
FAULT = record({"message": {**TEXT, "minLength": 1}, "type": TEXT}, {"param": TEXT, "code": TEXT})
ERROR = record({"error": FAULT})
ANTHROPIC_ERROR = record({"type": TEXT, "error": FAULT, "request_id": TEXT})

CALLS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": ANTHROPIC,
    "/v1/messages/count_tokens": COUNTED,
}
PAGE: list[Schema] = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100}},
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}},
    {"name": "after", "in": "query", "schema": TEXT},
]
READS: Mapping[str, Mapping[str, tuple[Schema, list[Schema]]]] = {
    "/v1/models": {"get": (record({"data": several(MODEL, 1)}), [])},
    "/v1/models/{model}": {"get": (MODEL, [])},
    "/v1/responses/{response}": {
        "get": (RESPONSES[1], []),
        "delete": (record({"id": TEXT, "deleted": FLAG}), []),
    },
    "/v1/responses/{response}/input_items": {
        "get": (record({"data": several(OBJECT), "has_more": FLAG}), PAGE)
    },
}
ADMIN: Mapping[str, Mapping[str, tuple[Schema, list[Schema]]]] = {
    "/sessions/{session}": {"get": (record({"session": TEXT, "turns": several(TURN)}), [])},
    "/health": {"get": (record({"status": TEXT}), [])},
    "/openapi.json": {"get": (record({"openapi": TEXT, "paths": OBJECT}), [])},
}


def document() -> Schema:
    """The OpenAPI document."""
    paths: dict[str, Any] = {"/metrics": {"get": {"responses": {"200": _content("text/plain")}}}}
    for path, methods in ADMIN.items():
        paths[path] = {name: _read(path, *read) for name, read in methods.items()}
    for prefix in ("", "/s/{session}"):
        for path, (body, answer) in CALLS.items():
            paths[prefix + path] = {"post": _call(prefix + path, body, answer)}
        for path, methods in READS.items():
            path = prefix + path
            paths[path] = {name: _read(path, *read) for name, read in methods.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "forge_jax gateway", "version": "1"},
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "paths": paths,
    }


def _call(path: str, body: Schema, answer: Schema) -> Schema:
    told = _content("application/json", answer)
    if not path.endswith("/count_tokens"):
        told["content"]["text/event-stream"] = {}
    return {
        "parameters": _parameters(path),
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": told, **_errors(path)},
    }


def _read(path: str, answer: Schema, query: list[Schema]) -> Schema:
    read = {
        "parameters": [*_parameters(path), *query],
        "responses": {"200": _content("application/json", answer), **_errors(path)},
    }
    return {**read, "security": [{"key": []}]} if path.startswith("/sessions/") else read


def _parameters(path: str) -> list[Schema]:
    sizes = {"minLength": 1, "maxLength": MOST_NAME}
    return [
        {"name": name, "in": "path", "required": True, "schema": {**TEXT, **sizes}}
        for name in ("session", "model", "response")
        if f"{{{name}}}" in path
    ]


def _errors(path: str) -> Mapping[str, Any]:
    error = ANTHROPIC_ERROR if "/v1/messages" in path else ERROR
    return {status: _content("application/json", error) for status in ("4XX", "5XX")}


def _content(kind: str, schema: Schema | None = None) -> dict[str, Any]:
    return {"description": kind, "content": {kind: {} if schema is None else {"schema": schema}}}
