"""Reads the conversation of an Anthropic Messages body.

Client JSON flows in, a `Conversation` flows out. Cache marks, thoughts of other servers, tools
that run at Anthropic and fields that nobody here knows are passed over; what is known but has
the wrong type, and content that is no text, is refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from forge_jax.gateway.chat_messages import Tool, template_variables
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
from forge_jax.gateway.signing import signed

ROLES = {"system": "system", "developer": "system", "assistant": "assistant"}
# A line that Claude Code writes for Anthropic's servers alone: no model is to read it, and a
# part of it is another in each request, so that no prompt would begin with the one before.
NOT_FOR_MODELS = "x-anthropic-billing-header:"
# The code by which clients know that they have to send history and tools with every request.
NO_THREADS = "thread_unsupported_request"


def read_conversation(body: Mapping[str, Any]) -> Conversation:
    """System, messages, tools and template switches of a body. Raises ApiError(400)."""
    if body.get("thread") is not None:
        why = "thread: no conversation is kept here, so that a request has to bring all of it"
        raise ApiError(400, why, param="thread", code=NO_THREADS)
    said = bounded(sequence(body, "messages"), "messages", MOST_MESSAGES)
    if not said:
        raise ApiError(400, "messages must hold at least one message", param="messages")
    messages = _system(body.get("system"))
    for i, value in enumerate(said):
        messages += _messages(value, f"messages[{i}]")
    choice = mapping(body, "tool_choice")
    kind = text(choice, "type", "tool_choice.")
    tools = () if kind == "none" else _tools(body)
    return Conversation(
        messages=tuple(messages),
        tools=tools,
        variables=template_variables(body),
        must_call=_must_call(choice, kind, tools),
        parallel=not flag(choice, "disable_parallel_tool_use", "tool_choice."),
    )


def _system(value: Any) -> list[Message]:
    if value is None:
        return []
    texts = []
    for block, path in _blocks(value, "system"):
        said = _text_of(block, path)
        if said.startswith(NOT_FOR_MODELS):
            said = said.partition("\n")[2]
        if said:
            texts.append(said)
    return [Message(role="system", content="\n".join(texts))] if texts else []


def _messages(value: Any, path: str) -> list[Message]:
    """What one message is in the shape that templates read: results of tools are of their own."""
    if not isinstance(value, dict):
        raise wrong(path, value, "an object")
    role = text(value, "role", f"{path}.")
    if role is None:
        raise ApiError(400, f"{path}.role is missing", param=f"{path}.role")
    blocks = _blocks(value.get("content"), f"{path}.content")
    if role == "assistant":
        return [_assistant(blocks)]
    return _told(ROLES.get(role, "user"), blocks)


def _assistant(blocks: Sequence[tuple[Mapping[str, Any], str]]) -> Message:
    """A reply; text of several blocks is one text, as it was when it was sampled."""
    content, thought, calls = "", "", []
    for block, path in blocks:
        kind = _kind(block, path)
        if kind == "text":
            content += _text_of(block, path)
        elif kind == "thinking":
            thought += _thought(block, path)
        elif kind == "tool_use":
            calls.append(_call(block, path))
        elif kind in ("image", "document"):
            raise _unread(kind, path)
        # Else a step of a tool that ran elsewhere, or a secret: none of it is the reply's text.
    return Message(role="assistant", content=content, calls=tuple(calls), thought=thought)


def _thought(block: Mapping[str, Any], path: str) -> str:
    """A thought that was told here; those of other servers belong to other models."""
    said = text(block, "thinking", f"{path}.") or ""
    return said if signed(said, text(block, "signature", f"{path}.") or "") else ""


def _call(block: Mapping[str, Any], path: str) -> ToolCall:
    name = text(block, "name", f"{path}.")
    if name is None:
        raise ApiError(400, f"{path}.name is missing", param=f"{path}.name")
    arguments = compact(mapping(block, "input", f"{path}."))
    return ToolCall(id=text(block, "id", f"{path}.") or "", name=name, arguments=arguments)


def _told(role: str, blocks: Sequence[tuple[Mapping[str, Any], str]]) -> list[Message]:
    """Text and results of tools in their order, neighbouring text in one message."""
    messages: list[Message] = []
    texts: list[str] = []
    for block, path in blocks:
        if _kind(block, path) != "tool_result":
            texts.append(_text_of(block, path))
            continue
        if texts:
            messages.append(Message(role=role, content="\n".join(texts)))
            texts = []
        messages.append(_result(block, path))
    if texts or not messages:
        messages.append(Message(role=role, content="\n".join(texts)))
    return messages


def _result(block: Mapping[str, Any], path: str) -> Message:
    inner = _blocks(block.get("content"), f"{path}.content")
    content = "\n".join(_text_of(*one) for one in inner)
    if flag(block, "is_error", f"{path}."):
        content = f"Error: {content}"  # no template has a place of its own for it
    called = text(block, "tool_use_id", f"{path}.") or ""
    return Message(role="tool", content=content, extra={"tool_call_id": called})


def _blocks(value: Any, path: str) -> list[tuple[Mapping[str, Any], str]]:
    """Blocks of a content and the path of each; a plain text is one block."""
    if value is None:
        return []
    if isinstance(value, str):
        return [({"type": "text", "text": value}, path)]
    if not isinstance(value, list):
        raise wrong(path, value, "a string or a list of blocks")
    for i, block in enumerate(value):
        if not isinstance(block, dict):
            raise wrong(f"{path}[{i}]", block, "a block with a type")
    return [(block, f"{path}[{i}]") for i, block in enumerate(value)]


def _kind(block: Mapping[str, Any], path: str) -> str:
    return text(block, "type", f"{path}.") or "text"


def _text_of(block: Mapping[str, Any], path: str) -> str:
    kind = _kind(block, path)
    if kind != "text":
        raise _unread(kind, path)
    return text(block, "text", f"{path}.") or ""


def _unread(kind: str, path: str) -> ApiError:
    return ApiError(400, f"{path}.type={kind!r}: this model reads text", param=f"{path}.type")


def _tools(body: Mapping[str, Any]) -> tuple[Tool, ...]:
    """The client's own tools, in OpenAI's shape."""
    tools = []
    for i, tool in enumerate(bounded(sequence(body, "tools"), "tools", MOST_TOOLS)):
        path = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise wrong(path, tool, "an object")
        if (text(tool, "type", f"{path}.") or "custom") != "custom":
            continue  # tools that Anthropic defines, which no model here can call
        name = text(tool, "name", f"{path}.")
        if not name:
            raise ApiError(400, f"{path}.name is missing", param=f"{path}.name")
        function: dict[str, Any] = {"name": name}
        description = text(tool, "description", f"{path}.")
        if description is not None:
            function["description"] = description
        function["parameters"] = mapping(tool, "input_schema", f"{path}.")
        if flag(tool, "strict", f"{path}."):
            function["strict"] = True
        tools.append({"type": "function", "function": function})
    return tuple(tools)


def _must_call(
    choice: Mapping[str, Any], kind: str | None, tools: tuple[Tool, ...]
) -> tuple[Tool, ...]:
    """The tools of which `tool_choice` asks for a call."""
    if kind in ("auto", "none") or not choice:
        return ()
    if kind == "any":
        if not tools:
            raise ApiError(400, "tool_choice.type='any' needs tools", param="tool_choice.type")
        return tools
    if kind != "tool":
        raise wrong("tool_choice.type", kind, "auto, any, tool or none")
    name = text(choice, "name", "tool_choice.")
    found = tuple(tool for tool in tools if tool["function"]["name"] == name)
    if not found:
        message = f"tool_choice.name={name!r} is none of the tools"
        raise ApiError(400, message, param="tool_choice.name")
    return found[:1]
