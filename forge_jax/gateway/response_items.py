"""Reads the items of a Responses body as messages of a conversation.

Items flow in, `Message`s flow out. A reply of the model comes as several items, text and
calls; by the ids that it was told with, or by their order, they become one message again.
Items that say nothing to a model here (hosted tools) are passed over.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from forge_jax.gateway.chat_messages import ROLES, read_content
from forge_jax.gateway.errors import ApiError
from forge_jax.gateway.fields import MOST_MESSAGES, bounded, sequence, text, wrong
from forge_jax.gateway.messages import Message, ToolCall, compact, encoded
from forge_jax.gateway.response_tools import Name
from forge_jax.gateway.signing import unsealed
from forge_jax.gateway.stored import Item, StoredResponses

ORIGIN = re.compile(r"(?:msg|fc|call|rs)_([0-9a-f]{24})_[0-9_]+")  # of what a reply is told with


def read_input(body: Mapping[str, Any], stored: StoredResponses) -> tuple[tuple[Item, ...], int]:
    """The items of a body, each with a type, references resolved, and how many bytes of them the
    body only refers to. Raises ApiError(400, 404)."""
    value = body.get("input")
    if value is None:
        return (), 0
    if isinstance(value, str):
        return (_whole({"role": "user", "content": value}),), 0
    if not isinstance(value, list):
        raise wrong("input", value, "a text or a list of items")
    given = bounded(value, "input", MOST_MESSAGES)
    items = tuple(_resolved(item, f"input[{i}]", stored) for i, item in enumerate(given))
    if len({id(item) for item in items}) < len(items):  # each a few bytes, and a whole item read
        raise ApiError(400, "input refers to one item twice", param="input")
    return items, sum(len(encoded(item)) for item in items if stored.holds(item))


def _resolved(item: Any, path: str, stored: StoredResponses) -> Item:
    if not isinstance(item, dict):
        raise wrong(path, item, "an object")
    kind = text(item, "type", f"{path}.")
    if kind is None and "role" not in item and not isinstance(item.get("id"), str):
        raise ApiError(400, f"{path}.type is missing", param=f"{path}.type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference"
    if kind != "item_reference":
        return _whole({**item, "type": kind})
    name = text(item, "id", f"{path}.")
    known = None if name is None else stored.item(name)
    if known is None:
        raise ApiError(404, f"{path}.id={name!r} is no stored item of this session", param=path)
    return known


def _whole(item: dict[str, Any]) -> Item:
    """A message with its content in parts, as it is told to clients."""
    content = item.get("content")
    if item.setdefault("type", "message") == "message" and isinstance(content, str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        item["content"] = [{"type": kind, "text": content}]
    return item


def read_messages(
    before: Sequence[Item], items: Sequence[Item], names: Mapping[Name, str]
) -> tuple[Message, ...]:
    """The messages of a stored talk and of the items that follow it. Raises ApiError(400)."""
    reader = _Reader(names)
    for i, item in enumerate(before):
        reader.read(item, f"previous_response_id[{i}]")
    for i, item in enumerate(items):
        reader.read(item, f"input[{i}]")
    return tuple(reader.messages)


class _Reader:
    """Puts messages together item by item."""

    def __init__(self, names: Mapping[Name, str]):
        self.messages: list[Message] = []
        self._names = names
        self._turn: int | None = None  # of the model's newest message, if only tools spoke since
        self._origin = ""  # of that turn
        self._thought = ""  # before the turn that begins next

    def read(self, item: Item, path: str) -> None:
        kind = item["type"]
        if kind == "message":
            self._message(item, path)
        elif kind == "function_call":
            self._reply(item, _call(item, path, self._names))
        elif kind == "reasoning":
            self._thought = _thought(item, path)
        elif kind == "function_call_output":
            extra = {"tool_call_id": text(item, "call_id", f"{path}.") or ""}
            content = read_content(item.get("output"), f"{path}.output")
            self.messages.append(Message(role="tool", content=content, extra=extra))

    def _message(self, item: Item, path: str) -> None:
        role = text(item, "role", f"{path}.")
        if role is None:
            raise ApiError(400, f"{path}.role is missing", param=f"{path}.role")
        content = read_content(item.get("content"), f"{path}.content")
        if role == "assistant":
            self._reply(item, content)
        else:
            self._turn, self._thought = None, ""
            self.messages.append(Message(role=ROLES.get(role, "user"), content=content))

    def _reply(self, item: Item, piece: str | ToolCall) -> None:
        """Adds to the model's turn, or begins one."""
        ids = (item.get("call_id"), item.get("id"))
        found = (ORIGIN.fullmatch(name) for name in ids if isinstance(name, str))
        origin = next((match[1] for match in found if match), "")
        if not self._goes_on(origin, isinstance(piece, str)):
            self._turn = len(self.messages)
            self._origin = ""
            self.messages.append(Message(role="assistant", content="", thought=self._thought))
        self._thought = ""
        assert self._turn is not None
        self._origin = self._origin or origin
        message = self.messages[self._turn]
        if isinstance(piece, str):
            message = replace(message, content=message.content + piece)
        else:
            message = replace(message, calls=(*message.calls, piece))
        self.messages[self._turn] = replace(message, reply=self._origin and f"{self._origin}_0")

    def _goes_on(self, origin: str, is_text: bool) -> bool:
        if self._turn is None:
            return False
        if origin and self._origin:  # whatever results of tools stand between
            return origin == self._origin
        if self._thought:
            return False
        behind_call = bool(self.messages[self._turn].calls)
        return self._turn == len(self.messages) - 1 and (behind_call or not is_text)


def _thought(item: Item, path: str) -> str:
    """The text of a thought, open or sealed here; "" of one that only others can read."""
    parts = sequence(item, "content", f"{path}.")
    texts = [text(part, "text", f"{path}.content.") or "" for part in parts if _is_open(part)]
    return "".join(texts) or unsealed(text(item, "encrypted_content", f"{path}.") or "")


def _is_open(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "reasoning_text"


def _call(item: Item, path: str, names: Mapping[Name, str]) -> ToolCall:
    name = text(item, "name", f"{path}.")
    if name is None:
        raise ApiError(400, f"{path}.name is missing", param=f"{path}.name")
    arguments = item.get("arguments")
    if not isinstance(arguments, str):
        arguments = compact({} if arguments is None else arguments)
    space = text(item, "namespace", f"{path}.") or ""
    return ToolCall(
        id=text(item, "call_id", f"{path}.") or "",
        name=names.get((space, name), name),
        arguments=arguments,
    )


def listed(items: Iterable[Item], after: str | None, limit: int, newest_first: bool) -> Any:
    """A page of items behind the one whose id is `after`."""
    order = list({item["id"]: item for item in items}.values())[:: -1 if newest_first else 1]
    names = [item["id"] for item in order]
    start = names.index(after) + 1 if after in names else 0
    page = order[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(order),
    }
