"""The context of a white-box agent: what the model sees, and how it came to be.

A context changes only by an operation that gives a new one, S_t -> S_{t+1}, and every
operation is on record. So each call of an episode is trained on the context that its
reply was sampled in, whatever was dropped before or after. The invariant: its first `pinned`
messages stay through everything but a wipe, and no result of a tool stands without its call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from forge_jax.agents.protocol import Message

DROPPED = "-"  # in place of a result of a tool that was dropped


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One transition of a context."""

    name: str  # "append" | "wipe" | one of `managing.OPERATIONS`
    messages: int  # how many messages the context has after it


@dataclass(frozen=True, kw_only=True)
class Context:
    """The messages of the next call, and a note that survives what is dropped.

    A round is a reply of the model with all that follows it up to the next one.
    """

    messages: tuple[Message, ...] = ()
    note: str = ""  # told behind the pinned messages from when something is dropped
    pinned: int = 0  # messages at the start that stay
    since: int = 0  # replies since the last operation but append
    operations: tuple[Operation, ...] = ()  # from the empty context to this one, in order

    @staticmethod
    def begun(messages: Sequence[Message]) -> "Context":
        """The context of a conversation before the model's first reply, which stays."""
        return replace(Context().append(*messages), pinned=len(messages))

    @property
    def characters(self) -> int:
        """Of all texts and tool calls."""
        return sum(map(_characters, self.messages))

    def append(self, *messages: Message) -> "Context":
        """The context with `messages` behind those it has."""
        after = self._after("append", (*self.messages, *messages))
        return replace(after, since=self.since + sum(map(_is_reply, messages)))

    def wipe(self, note: str) -> "Context":
        """The context without any message; only `note` is left of what was seen."""
        return replace(self._after("wipe", ()), note=note, pinned=0)

    def drop_oldest(self, keep: int) -> "Context":
        """The context without all but the `keep` newest rounds, behind the note."""
        starts = [
            i for i, message in enumerate(self.messages) if i >= self.pinned and _is_reply(message)
        ]
        kept = [len(self.messages), *reversed(starts)][min(keep, len(starts))]
        return self._after("drop_oldest", (*self._head, *self.messages[kept:]))

    def drop_tool_results(self, keep: int) -> "Context":
        """The context with DROPPED in place of all but the `keep` newest results of tools."""
        results = [i for i, message in enumerate(self.messages) if message["role"] == "tool"]
        old = set(results[: len(results) - keep])
        return self._rewritten("drop_tool_results", lambda i, text: DROPPED if i in old else text)

    def truncate(self, characters: int) -> "Context":
        """The context with every text but the model's own cut to so many characters."""
        return self._rewritten("truncate", lambda i, text: text[:characters])

    def summarise(self, text: str) -> "Context":
        """The context with `text` in place of all that is not pinned."""
        noted = replace(self, note=text)
        return noted._after("summarise", noted._head)

    def fold(self, result: str) -> "Context":
        """The context with `result` in place of all since the fold before; it stays from now on."""
        messages = (*self.messages[: self.pinned], told(result))
        return replace(self._after("fold", messages), pinned=len(messages))

    def take_note(self, text: str) -> "Context":
        """The context with another note; its messages are as they were."""
        return replace(self._after("note", self.messages), note=text)

    def count(self, name: str) -> int:
        """How often an operation was applied."""
        return sum(operation.name == name for operation in self.operations)

    @property
    def _head(self) -> tuple[Message, ...]:
        note = (told(self.note),) if self.note else ()
        return (*self.messages[: self.pinned], *note)

    def _rewritten(self, name: str, text: Callable[[int, str], str]) -> "Context":
        """With another text in every message that is neither pinned nor the model's."""
        messages = [
            message
            if i < self.pinned or _is_reply(message)
            else {**message, "content": text(i, message["content"])}
            for i, message in enumerate(self.messages)
        ]
        return self._after(name, tuple(messages))

    def _after(self, name: str, messages: tuple[Message, ...]) -> "Context":
        done = Operation(name=name, messages=len(messages))
        operations = (*self.operations, done)
        return replace(self, messages=messages, since=0, operations=operations)


def told(text: str) -> Message:
    """The message that tells the model what it wrote before: a note, a summary, a result."""
    return {"role": "user", "content": text}


def _is_reply(message: Message) -> bool:
    return bool(message["role"] == "assistant")


def _characters(message: Message) -> int:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    called = sum(len(one["name"]) + len(one["arguments"]) for one in functions)
    return len(message.get("content") or "") + called
