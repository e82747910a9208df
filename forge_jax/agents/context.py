"""The context of a white-box agent: what the model sees, and how it came to be.

A context changes only by an operation that gives a new one, S_t -> S_{t+1}, and every
operation is on record. So each call of an episode is trained on the context that its
reply was sampled in, whatever was dropped before or after.
"""

from dataclasses import dataclass

from forge_jax.agents.protocol import Message


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One transition of a context."""

    name: str  # "append" | "wipe"
    messages: int  # how many messages the context has after it


@dataclass(frozen=True, kw_only=True)
class Context:
    """The messages of the next call, and a note that survives a wipe."""

    messages: tuple[Message, ...] = ()
    note: str = ""
    operations: tuple[Operation, ...] = ()  # from the empty context to this one, in order

    def append(self, *messages: Message) -> "Context":
        """The context with `messages` behind those it has."""
        return self._after("append", (*self.messages, *messages), self.note)

    def wipe(self, note: str) -> "Context":
        """The context without any message; only `note` is left of what was seen."""
        return self._after("wipe", (), note)

    def count(self, name: str) -> int:
        """How often an operation was applied."""
        return sum(operation.name == name for operation in self.operations)

    def _after(self, name: str, messages: tuple[Message, ...], note: str) -> "Context":
        done = Operation(name=name, messages=len(messages))
        return Context(messages=messages, note=note, operations=(*self.operations, done))
