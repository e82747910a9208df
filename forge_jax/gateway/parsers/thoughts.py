"""Reasoning before the answer: ``<think>...</think>`` at the beginning of a reply.

Text flows in piece by piece; a thought, then what another parser reads of the rest, flow out. The
tag may be part of the prompt already. Without a closing tag all of the reply is thought.
"""

from forge_jax.gateway.messages import Piece, Thought
from forge_jax.gateway.parsers.protocol import ReplyParser, overlap

THINK, END_THINK = "<think>", "</think>"
BEFORE, WITHIN, BEHIND, ANSWER = range(4)  # where in its reply a parser is


class ThoughtParser:
    """Splits a reply; white space around a thought belongs to neither part."""

    def __init__(self, inner: ReplyParser, opened: bool):
        """`opened`: the prompt ends with the tag that opens a thought."""
        self._inner = inner
        self._opened = opened
        self._place = BEFORE
        self._text = ""  # not yet decided
        self._space = ""  # part of the thought only if more of it follows
        self._said = False

    @property
    def malformed(self) -> int:
        return self._inner.malformed

    def feed(self, text: str) -> list[Piece]:
        if self._place == ANSWER:
            return self._inner.feed(text)
        self._text += text
        out: list[Piece] = []
        if self._place == BEFORE:
            self._begin(last=False)
        if self._place == WITHIN:
            out += self._thought(last=False)
        if self._place == BEHIND:
            self._text = self._text.lstrip()
            self._place = ANSWER if self._text else BEHIND
        if self._place == ANSWER:
            text, self._text = self._text, ""
            out += self._inner.feed(text)
        return out

    def finish(self) -> list[Piece]:
        out: list[Piece] = []
        if self._place == BEFORE:
            self._begin(last=True)
        if self._place == WITHIN:
            out += self._thought(last=True)
        elif self._place == ANSWER:
            out += self._inner.feed(self._text)
        return out + self._inner.finish()

    def _begin(self, last: bool) -> None:
        text = self._text.lstrip()
        if text.startswith(THINK):
            self._place, self._text = WITHIN, text[len(THINK) :]
        elif last or not THINK.startswith(text):
            self._place = WITHIN if self._opened else ANSWER

    def _thought(self, last: bool) -> list[Piece]:
        said, closed, behind = self._text.partition(END_THINK)
        if closed:
            self._place, self._text = BEHIND, behind
        else:
            held = 0 if last else overlap(said, END_THINK)
            said, self._text = said[: len(said) - held], said[len(said) - held :]
        said = self._space + said if self._said else said.lstrip()
        body = said.rstrip()
        self._space = said[len(body) :]
        self._said = self._said or bool(body)
        return [Thought(body)] if body else []


def opens_thought(prompt: str) -> bool:
    """Whether a prompt ends with the tag behind which the model begins to think."""
    return prompt.rstrip().endswith(THINK)
