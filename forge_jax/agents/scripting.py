"""Scripted episodes of agents whose context is managed, call by call as a live one makes them.

A leader, which knows what to say, and a manager flow in; the calls of the episode flow out, each
with the context that a live agent would have sent.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from forge_jax.agents.context import Context
from forge_jax.agents.manager import Manager, Meter
from forge_jax.agents.own_tools import DONE
from forge_jax.agents.protocol import Message, ScriptedCall, Tool
from forge_jax.agents.white_box import tool_message


class Leader(Protocol):
    """Who plays in the place of the model, in a world of its own."""

    def reply(self, context: Context) -> Message:
        """The next reply, of one tool call at most; without a call it is the answer."""
        ...

    def use(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What the world's tool gives."""
        ...

    def write(self) -> str:
        """The text that the manager asks for."""
        ...


def led(
    leader: Leader,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    manager: Manager,
    max_turns: int,
) -> tuple[ScriptedCall, ...]:
    """The calls up to the answer, or up to so many replies.

    No server counts tokens here: where the manager goes by them, characters are counted alone.
    """
    context, offered = Context.begun(messages), (*tools, *manager.tools)
    own = [tool["function"]["name"] for tool in manager.tools]
    calls: list[ScriptedCall] = []
    written = 0
    while len(calls) - written < max_turns:
        reply = leader.reply(context)
        calls.append(ScriptedCall(messages=context.messages, tools=offered, reply=reply))
        if "tool_calls" not in reply:
            break
        (call,) = reply["tool_calls"]
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        result = DONE if name in own else leader.use(name, arguments)
        context = context.append(reply).append(tool_message(call["id"], result))
        if name in own:
            context = manager.applied(context, arguments.get("text", ""))
        if manager.due(context, Meter()):
            text, request = "", manager.request(context)
            if request is not None:
                text, written = leader.write(), written + 1
                said = {"role": "assistant", "content": text}
                calls.append(ScriptedCall(messages=request.messages, tools=offered, reply=said))
            context = manager.applied(context, text)
    return tuple(calls)


def calling(name: str, arguments: Mapping[str, Any]) -> Message:
    """A reply that is one call."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": "call_0", "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def saying(text: str) -> Message:
    """A reply that is an answer."""
    return {"role": "assistant", "content": text}
