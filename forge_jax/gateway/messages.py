"""Messages of a conversation, the same whatever protocol brought them.

Client JSON flows in, frozen messages flow out. Two messages with equal `key` say the
same thing: arguments are compared as parsed values, text without the white space
around it, and ids, names and refusals not at all.
"""

import functools
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call of a function, as the model asked for it."""

    id: str
    name: str
    arguments: str  # JSON text, as on the wire

    @functools.cached_property
    def key(self) -> tuple[str, str]:
        """Name and canonical arguments."""
        return self.name, canonical(self.arguments)

    def wire(self) -> dict[str, Any]:
        """The call in OpenAI's shape."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class Thought:
    """A piece of the reasoning before an answer."""

    text: str


Piece = str | Thought | ToolCall  # of a reply


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message; `content` is "" where the client sent none."""

    role: str  # "system" | "user" | "assistant" | "tool"
    content: str
    calls: tuple[ToolCall, ...] = ()
    thought: str = ""  # of an assistant
    extra: Mapping[str, str] = field(default_factory=dict)  # name, tool_call_id, ...
    reply: str = ""  # name of the completion it was told as, where ids say that

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """What the message says, for comparing an assistant's turn with a recorded one."""
        return self.content.strip(), tuple(call.key for call in self.calls)

    def wire(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        plain: dict[str, Any] = {"role": self.role, "content": self.content, **self.extra}
        if self.thought:
            plain["reasoning_content"] = self.thought
        if self.calls:
            plain["tool_calls"] = [call.wire() for call in self.calls]
        return plain


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a chat template needs to write a prompt."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # OpenAI shape
    variables: Mapping[str, Any] = field(default_factory=dict)  # the template's own switches
    must_call: tuple[Mapping[str, Any], ...] = ()  # tools of which one has to be called
    parallel: bool = True  # one reply may have several calls


def compact(value: Any) -> str:
    """`value` as JSON without spare white space, fit to be encoded."""
    return encoded(value).decode()


def encoded(value: Any) -> bytes:
    """`value` as JSON in UTF-8; ASCII only where it holds lone surrogates."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def canonical(arguments: str) -> str:
    """One text for all JSON texts of one value; what is no JSON of sane depth is its own."""
    try:
        return json.dumps(_whole(json.loads(arguments)), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _whole(value: Any) -> Any:
    # JavaScript clients write 1.0 back as 1, and have no whole numbers but doubles.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, int) and 2**53 < abs(value) <= sys.float_info.max:
        return int(float(value))
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return value
