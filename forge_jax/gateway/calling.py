"""Grammars of replies that must, or may, call tools, in the format that the model writes.

Tools and the form of the answer flow in, a grammar flows out. Invariant: what it lets through is
read by the parser of the same format as the calls it was meant to be. A model that reasons may
do so before the grammar begins.
"""

import json
from collections.abc import Sequence
from dataclasses import replace

from forge_jax.drawing import GRAMMAR, JSON_SCHEMA, Grammar
from forge_jax.gateway.call_rules import answer_or_call, calls, free, strict
from forge_jax.gateway.errors import ApiError
from forge_jax.gateway.messages import Conversation
from forge_jax.gateway.parsers.thoughts import END_THINK, THINK, opens_thought
from forge_jax.gateway.structure import FORMATS
from forge_jax.models.chat import ChatFormat


def reply_grammar(
    talk: Conversation, answer: Grammar | None, form: ChatFormat, prompt: str
) -> Grammar | None:
    """Of a reply to a request that may offer tools, written as the text `prompt`; None: any text.

    A call that is asked for comes in place of the answer of a `response_format`, one that is left
    to the model beside it. Raises ApiError(400) where the two contradict.
    """
    closed = prompt.rstrip().endswith(END_THINK)  # the request asked for no thought
    if form.reasoning == "none" or closed:
        return _of_answer(talk, answer, form.tool_format, "")
    opening = "" if opens_thought(prompt) else THINK
    grammar = _of_answer(talk, answer, form.tool_format, opening)
    return None if grammar is None else replace(grammar, thought=(opening, END_THINK))


def _of_answer(
    talk: Conversation, answer: Grammar | None, form: str, thought: str
) -> Grammar | None:
    """The grammar of what is not thought; `thought` may begin one before it."""
    if answer is not None and answer.source not in FORMATS:
        if talk.must_call:
            message = f"{answer.source} does not go with tool_choice, which asks for a call"
            raise ApiError(400, message, param=answer.source)
        return answer
    if talk.must_call:
        return _grammar(
            ["start: calls", *calls(talk.must_call, form, talk.parallel)], "tool_choice"
        )
    if answer is not None and talk.tools:
        if form in ("llama3", "json"):  # where calls look like answers
            schema = answer_or_call(json.loads(answer.text), talk.tools, form, talk.parallel)
            return Grammar(kind=JSON_SCHEMA, text=json.dumps(schema), source=answer.source)
        rules = ["start: answer | calls", f"answer: %json {answer.text}"]
        return _grammar([*rules, *calls(talk.tools, form, talk.parallel)], answer.source)
    if answer is None and form != "lookup" and any(map(strict, talk.tools)):
        return _grammar(free(talk.tools, form, talk.parallel, thought), "tools")
    return answer


def _grammar(rules: Sequence[str], source: str) -> Grammar:
    return Grammar(kind=GRAMMAR, text="\n".join(rules), source=source)
