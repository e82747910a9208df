"""Tools of a Responses body: functions, flat or in namespaces, and which must be called.

A body flows in; tools in the shape that chat templates read flow out. Models see one name
for each function, clients its namespace and the name in it. Tools that no model here can
call (web search, shells, ...) are passed over.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from forge_jax.gateway.errors import ApiError
from forge_jax.gateway.fields import MOST_TOOLS, bounded, mapping, sequence, text, wrong

Tool = Mapping[str, Any]
Name = tuple[str, str]  # namespace ("" for none), name in it
FUNCTION_KEYS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, kw_only=True)
class Offered:
    """The functions that a request offers."""

    tools: tuple[Tool, ...] = ()  # OpenAI's chat shape, as templates read them
    names: Mapping[Name, str]  # as the model sees them
    must_call: tuple[Tool, ...] = ()  # of which one has to be called


def read_tools(body: Mapping[str, Any]) -> Offered:
    """The tools of a body. Raises ApiError(400)."""
    functions = _functions(sequence(body, "tools"))
    bounded(functions, "tools", MOST_TOOLS)
    names = shown_names([name for name, _ in functions])
    tools = {
        name: {"type": "function", "function": {**function, "name": names[name]}}
        for name, function in functions
    }
    choice = body.get("tool_choice")
    if choice == "none":
        return Offered(names=names)
    offered = tuple(tools.values())
    if choice in (None, "auto"):
        return Offered(tools=offered, names=names)
    if choice == "required":
        return Offered(tools=offered, names=names, must_call=_some(offered, "'required'"))
    if not isinstance(choice, dict):
        raise wrong("tool_choice", choice, "none, auto, required or an object")
    kind = text(choice, "type", "tool_choice.")
    if kind == "function":
        wanted = (tools[_chosen(choice, tools, "tool_choice")],)
        return Offered(tools=offered, names=names, must_call=wanted)
    if kind == "allowed_tools":
        allowed = _allowed(choice, tools)
        required = choice.get("mode") == "required"
        must_call = _some(allowed, "'allowed_tools'") if required else ()
        return Offered(tools=allowed, names=names, must_call=must_call)
    return Offered(tools=offered, names=names)  # a tool that was passed over


def told_tools(body: Mapping[str, Any]) -> list[Any]:
    """The tools of a body that are not passed over, as the client wrote them."""
    kinds = ("function", "namespace")
    return [tool for tool in sequence(body, "tools") if tool.get("type") in kinds]


def shown_names(names: Sequence[Name]) -> dict[Name, str]:
    """One name for each function: its own, behind its namespace's where that is taken, and with
    a number where that is taken too."""
    shown: dict[Name, str] = {}
    taken: set[str] = set()
    for namespace, name in sorted(names, key=lambda one: one[0] != ""):  # flat ones first
        if (namespace, name) not in shown:
            apart = f"{namespace}__{name}"
            wanted = chain((name, apart), (f"{apart}_{i}" for i in count(2)))
            free = next(one for one in wanted if one not in taken)
            shown[namespace, name] = free
            taken.add(free)
    return shown


def _functions(tools: Sequence[Any], space: str = "", above: str = "") -> list[tuple[Name, Tool]]:
    found: list[tuple[Name, Tool]] = []
    for i, tool in enumerate(tools):
        path = f"{above}tools[{i}]"
        if not isinstance(tool, dict):
            raise wrong(path, tool, "an object")
        kind = tool.get("type")
        if kind == "namespace" and not above:
            inside = sequence(tool, "tools", f"{path}.")
            found += _functions(inside, text(tool, "name", f"{path}.") or "", f"{path}.")
        if kind != "function":
            continue
        name = text(tool, "name", f"{path}.")
        if not name:
            raise ApiError(400, f"{path}.name is missing", param=f"{path}.name")
        mapping(tool, "parameters", f"{path}.")
        function = {key: tool[key] for key in FUNCTION_KEYS if tool.get(key) is not None}
        found.append(((space, name), function))
    return found


def _chosen(choice: Mapping[str, Any], tools: Mapping[Name, Tool], path: str) -> Name:
    """Which of the tools `choice` names, by its name and perhaps its namespace."""
    name = text(choice, "name", f"{path}.")
    space = text(choice, "namespace", f"{path}.")
    for known in tools:
        if known[1] == name and space in (None, known[0]):
            return known
    raise ApiError(400, f"{path}.name={name!r} is none of the tools", param=f"{path}.name")


def _allowed(choice: Mapping[str, Any], tools: Mapping[Name, Tool]) -> tuple[Tool, ...]:
    allowed = []
    for i, tool in enumerate(sequence(choice, "tools", "tool_choice.")):
        path = f"tool_choice.tools[{i}]"
        if not isinstance(tool, dict):
            raise wrong(path, tool, "an object")
        if tool.get("type") == "function":
            allowed.append(_chosen(tool, tools, path))
    return tuple(tool for name, tool in tools.items() if name in allowed)


def _some(tools: tuple[Tool, ...], choice: str) -> tuple[Tool, ...]:
    if not tools:
        raise ApiError(400, f"tool_choice={choice} needs tools", param="tool_choice")
    return tools
