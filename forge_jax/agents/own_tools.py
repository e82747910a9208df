"""Tools that a white-box agent has of itself, beside those of its world.

Arguments that the model wrote flow in, a text flows back to it. What such a tool does is no part
of the world: no limit of the world is about it, and its faults are the agent's.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge_jax.agents.context import Context
from forge_jax.agents.manager import Manager
from forge_jax.agents.protocol import Tool
from forge_jax.agents.tally import Tally
from forge_jax.config import check

DONE = "ok"


@dataclass(frozen=True, kw_only=True)
class OwnTool:
    """One of them."""

    tool: Tool
    call: Callable[[Mapping[str, Any]], Awaitable[str]]  # raises BadCall as a world does

    @property
    def name(self) -> str:
        return str(self.tool["function"]["name"])


def offered(tools: Sequence[Tool], own: Sequence[OwnTool]) -> tuple[Tool, ...]:
    """All tools of an agent. Raises ValueError where the world has one of the name of its own."""
    taken = {tool["function"]["name"] for tool in tools}
    for one in own:
        check(one.name not in taken, f"the world has a tool {one.name!r} as the agent itself has")
    return (*tools, *(one.tool for one in own))


class Choices:
    """What the model chooses to do to its context: done once its calls have all been answered."""

    def __init__(self, manager: Manager):
        self._manager = manager
        self._calls: list[Mapping[str, Any]] = []

    @property
    def tools(self) -> tuple[OwnTool, ...]:
        """The operation, where its policy leaves it to the model."""
        return tuple(OwnTool(tool=tool, call=self._choose) for tool in self._manager.tools)

    async def _choose(self, arguments: Mapping[str, Any]) -> str:
        self._manager.check_call(arguments)
        self._calls.append(arguments)
        return DONE

    def applied(self, context: Context, tally: Tally) -> Context:
        """The context after what was chosen since the last time, in order."""
        for arguments in self._calls:
            context = self._manager.applied(context, arguments.get("text", ""))
            tally.shortened += 1
        self._calls.clear()
        return context
