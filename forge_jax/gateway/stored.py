"""Responses that a session keeps, so that later calls may refer to them by id.

What a call was given and what it answered flow in; whole responses and single items flow
out. What a call holds is dropped with the call, but a response that goes on from it keeps
the talk before it alive, and counts for all of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Item = Mapping[str, Any]
PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Given:
    """What a response is asked with."""

    items: tuple[Item, ...]  # of this request, references resolved
    previous: "Stored | None"  # the response that it goes on from
    referred_bytes: int = 0  # of those items that the request has by reference only

    @property
    def kept_bytes(self) -> int:
        """What this keeps alive beside the request itself."""
        return self.referred_bytes + (0 if self.previous is None else self.previous.bytes)

    def before(self) -> list[Item]:
        """All items before this request's own, the oldest first."""
        parts: list[Sequence[Item]] = []
        stored = self.previous
        while stored is not None:
            parts += [stored.answer["output"], stored.given.items]
            stored = stored.given.previous
        return [item for part in reversed(parts) for item in part]


@dataclass(frozen=True, kw_only=True, eq=False)
class Stored:
    """A response and what it was asked with."""

    answer: Mapping[str, Any]  # the response object
    given: Given
    bytes: int  # of its request and of all that it goes on from


class StoredResponses:
    """The stored responses of one session."""

    def __init__(self) -> None:
        self._responses: dict[str, Stored] = {}
        self._items: dict[str, dict[str, Item]] = {}  # item id -> response id -> item

    def add(self, given: Given, answer: Mapping[str, Any], request_bytes: int) -> None:
        """Keeps an answered response; its items without an id get one. `request_bytes` are those
        of its request and of all that this goes on from."""
        name = answer["id"]
        items = tuple(
            _named(item, f"{response_key(name)}_i{i}") for i, item in enumerate(given.items)
        )
        given = replace(given, items=items)
        self._responses[name] = Stored(answer=answer, given=given, bytes=request_bytes)
        for item in (*items, *answer["output"]):
            self._items.setdefault(item["id"], {})[name] = item

    def discard(self, name: str) -> bool:
        """Forgets the response `name` and its items; False if there is none."""
        stored = self._responses.pop(name, None)
        if stored is None:
            return False
        for item in (*stored.given.items, *stored.answer["output"]):
            holders = self._items.get(item["id"], {})
            holders.pop(name, None)
            if not holders:
                self._items.pop(item["id"], None)
        return True

    def response(self, name: str) -> Stored | None:
        """The response of that id."""
        return self._responses.get(name)

    def item(self, name: str) -> Item | None:
        """The item of that id, as the newest response has it."""
        holders = self._items.get(name)
        return None if holders is None else next(reversed(holders.values()))

    def holds(self, item: Item) -> bool:
        """True for an item that came from here, not from a request."""
        name = item.get("id")
        return isinstance(name, str) and self.item(name) is item


def response_id(call_id: str) -> str:
    """The id of the response of a call."""
    return f"resp_{call_id}"


def response_key(name: str) -> str:
    """What the ids of a response's items have in common."""
    return name.removeprefix("resp_")


def _named(item: Item, end: str) -> Item:
    if isinstance(item.get("id"), str) and item["id"]:
        return item
    return {**item, "id": f"{PREFIXES.get(item['type'], 'msg')}_{end}"}
