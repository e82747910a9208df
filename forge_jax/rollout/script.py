"""Scripts of the scripted engine: rules read from a file, and which rule a call meets.

A JSON file flows in, validated rules flow out; the first rule that matches a call wins.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forge_jax.config import UserError, check, load
from forge_jax.rollout.schema import minimal
from forge_jax.types import Facts


@dataclass(frozen=True, kw_only=True)
class When:
    """What a call must look like; None does not care."""

    tools: bool | None = None  # it offers tools
    tool_result: bool | None = None  # its last message is a tool's result
    json_schema: bool | None = None  # it asks for a response of some schema
    call: int | None = None  # its number in its session, from 0
    contains: str | None = None  # a substring of the rendered prompt

    def matches(self, facts: Facts) -> bool:
        seen = {
            "tools": bool(facts.tools),
            "tool_result": facts.tool_result,
            "json_schema": facts.json_schema is not None,
            "call": facts.call,
        }
        cares = {name: value for name, value in vars(self).items() if value is not None}
        text = cares.pop("contains", "")
        return text in facts.text and all(seen[name] == value for name, value in cares.items())


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One answer, and the calls it is for."""

    when: When = field(default_factory=When)
    text: str = ""  # {tool} and {arguments} are replaced, see `answer`
    chunks: int = 1  # pieces the answer comes in
    delay_seconds: float = 0.0  # the answer takes, spread over its pieces
    fail_status: int | None = None  # the call fails with this HTTP status instead

    def __post_init__(self) -> None:
        check(self.chunks >= 1, f"chunks={self.chunks} must be at least 1")
        check(self.delay_seconds >= 0, f"delay_seconds={self.delay_seconds} must be >= 0")
        check(
            self.fail_status is None or 400 <= self.fail_status <= 599,
            f"fail_status={self.fail_status} must be 400 to 599",
        )


def read_script(path: str | Path) -> tuple[Rule, ...]:
    """The rules of a JSON file.

    Raises UserError naming the file, or the number of the rule, from 0, and the field.
    """
    try:
        rules = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"script={path}: {error}") from error
    if not isinstance(rules, list):
        raise UserError(f"script={path} must be a list of rules, not {type(rules).__name__}")
    return tuple(_rule(number, rule) for number, rule in enumerate(rules))


def _rule(number: int, rule: object) -> Rule:
    if not isinstance(rule, dict):
        raise UserError(f"rule {number} is {rule!r}, not an object")
    if "text" not in rule and "fail_status" not in rule:
        raise UserError(f"rule {number} has neither text nor fail_status")
    return load(Rule, rule, f"rule {number}.")


def match(rules: Sequence[Rule], facts: Facts) -> tuple[int, Rule] | None:
    """The first rule for a call, and its number."""
    return next(((i, rule) for i, rule in enumerate(rules) if rule.when.matches(facts)), None)


def answer(rule: Rule, facts: Facts) -> str:
    """The text of a rule with its placeholders replaced, literally.

    {tool} is the name of the first tool offered, {arguments} a minimal JSON object for its
    parameters, or for the schema of the response where no tool is offered. Raises ValueError
    where the call offers neither or the schema cannot be met.
    """
    text = rule.text
    tool = facts.tools[0]["function"] if facts.tools else None
    if "{tool}" in text:
        if tool is None:
            raise ValueError("{tool} in the text, but the call offers no tool")
        text = text.replace("{tool}", tool["name"])
    if "{arguments}" in rule.text:
        schema = facts.json_schema if tool is None else tool.get("parameters") or {}
        if schema is None:
            raise ValueError("{arguments} in the text, but the call offers no tool and no schema")
        text = text.replace("{arguments}", json.dumps(minimal(schema)))
    return text
