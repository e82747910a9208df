"""What keeps the context of an agent small: when something is done to it, and what.

A context and what its server counted flow in, the context of the next call flows out. The
manager itself keeps nothing: what it decides follows from these. The invariant: a text that
stands in for others was written by the model, in a call of the session.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forge_jax.agents.context import Context, told
from forge_jax.agents.faults import BadCall
from forge_jax.agents.protocol import Tool
from forge_jax.managing import WRITTEN, ContextConfig

PRIOR = 0.25  # tokens of a character, before a server has counted
# What the model is asked for, where it does not call a tool for it.
ASKED: Mapping[str, str] = {
    "summarise": "Summarise all but the first message.",
    "fold": "Result?",
    "note": "Note?",
}
DESCRIBED: Mapping[str, str] = {
    "drop_oldest": "Forgets all but the newest messages.",
    "drop_tool_results": "Forgets all but the newest results of tools.",
    "truncate": "Cuts long messages.",
    "summarise": "Puts a summary in the place of what was said since the task.",
    "fold": "Puts a result in the place of what was said since the last one.",
    "note": "Writes a note that stays, in the place of older messages.",
}


@dataclass(frozen=True, kw_only=True)
class Meter:
    """How many tokens a context has, by what the server counted last.

    Only the server knows its template and tokenizer. What came since it counted is estimated
    from characters, at the rate at which the last calls grew.
    """

    tokens: float = 0.0  # of a context
    characters: int = 0  # of the same
    rate: float = PRIOR  # tokens of a character

    def counted(self, context: Context, tokens: int) -> "Meter":
        """After a call with `context`, whose prompt had so many tokens."""
        grown = context.characters - self.characters
        rate = self.rate
        if self.tokens and grown > 0 and tokens > self.tokens:
            rate = (tokens - self.tokens) / grown
        return Meter(tokens=float(tokens), characters=context.characters, rate=rate)

    def tokens_of(self, context: Context) -> float:
        """Of any context of the same episode."""
        return max(0.0, self.tokens + self.rate * (context.characters - self.characters))


@dataclass(frozen=True, kw_only=True)
class Manager:
    """Decides when a context is shortened and shortens it, as its configuration says."""

    cfg: ContextConfig = field(default_factory=ContextConfig)

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The operation, where the model is to choose when."""
        match self.cfg:
            case ContextConfig(policy="tool", operation=str(operation)):
                return (tool_of(operation),)
        return ()

    def overflows(self, context: Context, meter: Meter) -> bool:
        """True for a context that is beyond the budget."""
        return self.cfg.budget is not None and meter.tokens_of(context) > self.cfg.budget

    def due(self, context: Context, meter: Meter) -> bool:
        """Whether the operation is to be applied now, without the model having called it."""
        match self.cfg:
            case ContextConfig(policy="fixed", every=int(every)):
                return context.since >= every
            case ContextConfig(policy="threshold", budget=int(budget), share=float(share)):
                return context.since > 0 and meter.tokens_of(context) > share * budget
        return False

    def request(self, context: Context) -> Context | None:
        """The context in which the model writes the text that the operation needs; None: none."""
        asked = ASKED.get(self.cfg.operation or "")
        return None if asked is None else context.append(told(asked))

    def applied(self, context: Context, text: str = "") -> Context:
        """The context after the operation; `text` is the model's, where it needs one."""
        match self.cfg:
            case ContextConfig(operation="drop_oldest", keep=int(keep)):
                return context.drop_oldest(keep)
            case ContextConfig(operation="drop_tool_results", keep=int(keep)):
                return context.drop_tool_results(keep)
            case ContextConfig(operation="truncate", characters=int(characters)):
                return context.truncate(characters)
            case ContextConfig(operation="note", keep=int(keep)):
                return context.take_note(text).drop_oldest(keep)
            case ContextConfig(operation="summarise"):
                return context.summarise(text)
            case ContextConfig(operation="fold"):
                return context.fold(text)
        raise AssertionError(f"{self.cfg} has no operation")

    def check_call(self, arguments: Mapping[str, Any]) -> None:
        """Raises BadCall unless these are the arguments of the operation as a tool."""
        wanted = ["text"] if self.cfg.operation in WRITTEN else []
        if sorted(arguments) != wanted or not all(isinstance(v, str) for v in arguments.values()):
            takes = "a text" if wanted else "nothing"
            raise BadCall(f"{self.cfg.operation} takes {takes}, not {sorted(arguments)}")


def tool_of(operation: str) -> Tool:
    """An operation as a tool."""
    text = {"text": {"type": "string"}} if operation in WRITTEN else {}
    parameters = {"type": "object", "properties": text, "required": list(text)}
    function = {
        "name": operation,
        "description": DESCRIBED[operation],
        "parameters": parameters,
    }
    return {"type": "function", "function": function}
