"""Reads the conversation of a Chat Completions body.

Client JSON flows in, a `Conversation` flows out. Roles, keys and tools that nobody
here knows are tolerated; what is known but has the wrong type is refused by name.
"""

from collections.abc import Mapping
from typing import Any

from forge_jax.gateway.errors import ApiError
from forge_jax.gateway.fields import (
    MOST_MESSAGES,
    MOST_TOOLS,
    bounded,
    flag,
    mapping,
    sequence,
    text,
    wrong,
)
from forge_jax.gateway.messages import Conversation, Message, ToolCall, compact

Tool = Mapping[str, Any]
ROLES = {"system": "system", "developer": "system", "assistant": "assistant", "tool": "tool",
         "function": "tool"}  # fmt: skip
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
EXTRA = ("name", "tool_call_id")
RESERVED = ("self", "messages", "tools", "add_generation_prompt", "bos_token", "eos_token")


def read_conversation(body: Mapping[str, Any]) -> Conversation:
    """Messages, tools and template switches of a body. Raises ApiError(400)."""
    messages = bounded(sequence(body, "messages"), "messages", MOST_MESSAGES)
    if not messages:
        raise ApiError(400, "messages must hold at least one message", param="messages")
    tools = () if body.get("tool_choice") == "none" else _tools(body)
    return Conversation(
        messages=tuple(_message(m, f"messages[{i}]") for i, m in enumerate(messages)),
        tools=tools,
        variables=template_variables(body),
        must_call=_must_call(body, tools),
        parallel=body.get("parallel_tool_calls") is None or flag(body, "parallel_tool_calls"),
    )


def template_variables(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The template's own switches. Raises ApiError(400) on what is none."""
    variables = mapping(body, "chat_template_kwargs")
    for name in RESERVED:
        if name in variables:
            path = f"chat_template_kwargs.{name}"
            raise ApiError(400, f"{path} is not a switch of a template", param=path)
    return variables


def _message(value: Any, path: str) -> Message:
    if not isinstance(value, dict):
        raise wrong(path, value, "an object")
    role = text(value, "role", f"{path}.")
    if role is None:
        raise ApiError(400, f"{path}.role is missing", param=f"{path}.role")
    calls = sequence(value, "tool_calls", f"{path}.") if role == "assistant" else ()
    extra = {name: value[name] for name in EXTRA if isinstance(value.get(name), str)}
    return Message(
        role=ROLES.get(role, "user"),
        content=read_content(value.get("content"), f"{path}.content"),
        calls=tuple(_call(c, f"{path}.tool_calls[{i}]") for i, c in enumerate(calls)),
        extra=extra,
        thought=_thought(value, f"{path}.") if role == "assistant" else "",
    )


def _thought(value: Mapping[str, Any], path: str) -> str:
    """The reasoning of a reply, by either name that servers tell it by."""
    return text(value, "reasoning_content", path) or text(value, "reasoning", path) or ""


def read_content(value: Any, path: str) -> str:
    """The text of a content, a string or a list of parts. Raises ApiError(400)."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(path, value, "a string or a list of parts")
    return "\n".join(_part(part, f"{path}[{i}]") for i, part in enumerate(value))


def _part(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise wrong(path, part, "a part with a type and a text")
    kind = text(part, "type", f"{path}.") or "text"
    if kind not in TEXT_PARTS:
        raise ApiError(400, f"{path}.type={kind!r}: this model reads text", param=f"{path}.type")
    return text(part, TEXT_PARTS[kind], f"{path}.") or ""


def _call(value: Any, path: str) -> ToolCall:
    if not isinstance(value, dict):
        raise wrong(path, value, "an object")
    function = mapping(value, "function", f"{path}.")
    name = text(function, "name", f"{path}.function.")
    if name is None:
        raise ApiError(400, f"{path}.function.name is missing", param=f"{path}.function.name")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):  # some clients send the object itself
        arguments = compact({} if arguments is None else arguments)
    return ToolCall(id=text(value, "id", f"{path}.") or "", name=name, arguments=arguments)


def _tools(body: Mapping[str, Any]) -> tuple[Tool, ...]:
    tools = []
    for i, tool in enumerate(bounded(sequence(body, "tools"), "tools", MOST_TOOLS)):
        path = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise wrong(path, tool, "an object")
        if tool.get("type", "function") != "function":
            continue  # hosted tools, which no model here can call
        function = mapping(tool, "function", f"{path}.")
        if not text(function, "name", f"{path}.function."):
            raise ApiError(400, f"{path}.function.name is missing", param=f"{path}.function.name")
        mapping(function, "parameters", f"{path}.function.")
        # Nothing else is kept: cache marks move from request to request.
        tools.append({"type": "function", "function": function})
    return tuple(tools)


def _must_call(body: Mapping[str, Any], tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """The tools of which `tool_choice` asks for a call."""
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required":
        if not tools:
            raise ApiError(400, "tool_choice='required' needs tools", param="tool_choice")
        return tools
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise wrong("tool_choice", choice, "none, auto, required or a function")
    name = text(mapping(choice, "function", "tool_choice."), "name", "tool_choice.function.")
    found = tuple(tool for tool in tools if tool["function"]["name"] == name)
    if not found:
        path = "tool_choice.function.name"
        raise ApiError(400, f"{path}={name!r} is none of the tools", param=path)
    return found[:1]
