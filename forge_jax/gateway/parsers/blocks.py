"""Finds the blocks of a reply that are tool calls, whatever the format writes them like.

A format says where a block may begin and what a block is; here its text is kept until that is
decided, and everything else is content. Invariant: what a format has decided of a text it
decides of every longer one, so it does not matter when it is asked.
"""

from dataclasses import dataclass
from typing import Protocol

from forge_jax.gateway.messages import Piece, ToolCall
from forge_jax.gateway.parsers.protocol import overlap

# How often an undecided block may be read again: in characters read for each it has.
MOST_READ = 64


@dataclass(frozen=True)
class Before:
    """What stands before a text that is not decided yet."""

    blank: bool = True  # white space alone, from the beginning of the reply
    line: bool = True  # the end of a line, or nothing
    behind: bool = False  # a call, and white space alone behind it


@dataclass(frozen=True)
class Start:
    """Where text that is content ends, and where a block begins; between them separators stand."""

    content: int
    block: int | None = None  # none does yet, and what is behind the content may be one's beginning


@dataclass(frozen=True)
class Block:
    """A block from its beginning to `end`: calls, name and arguments each, or, without, text."""

    end: int
    calls: tuple[tuple[str, str], ...] = ()
    malformed: bool = False  # it is a call that cannot be read


class Format(Protocol):
    """How a model writes tool calls."""

    def start(self, text: str, before: Before, last: bool) -> Start:
        """Where `text` may begin a block; `last`: no more text comes."""
        ...

    def read(self, text: str, last: bool) -> Block | None:
        """The block that `text` begins with; None where more text is needed to know."""
        ...


class BlockParser:
    """Content and calls of one reply. White space beside a call is not content; a reply without
    calls is left as it is."""

    def __init__(self, form: Format, prefix: str):
        """`prefix` begins the ids of the calls found."""
        self.malformed = 0
        self._form = form
        self._prefix = prefix
        self._text = ""  # not yet decided
        self._inside = False  # it begins a block
        self._gap = ""  # before that block, content only if the block is
        self._read = 0  # characters read of that block so far, again and again
        self._before = Before()
        self._space = ""  # white space that is content only if content follows
        self._said = False
        self._count = 0
        self._out: list[Piece] = []

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        while self._text and self._step(last=False):
            pass
        return self._take()

    def finish(self) -> list[Piece]:
        while self._text and self._step(last=True):
            pass
        if self._count == 0 and self._space:
            self._out.append(self._space)
        return self._take()

    def _take(self) -> list[Piece]:
        out, self._out = self._out, []
        return out

    def _step(self, last: bool) -> bool:
        """Decides one piece of the text; False where nothing more can be decided."""
        return self._block(last) if self._inside else self._outside(last)

    def _outside(self, last: bool) -> bool:
        start = self._form.start(self._text, self._before, last)
        self._content(self._text[: start.content])
        begin = start.content if start.block is None else start.block
        self._gap = self._text[start.content : begin]
        self._text = self._text[begin:]
        self._inside, self._read = start.block is not None, 0
        return self._inside

    def _block(self, last: bool) -> bool:
        self._read += len(self._text)
        if not last and self._read > MOST_READ * len(self._text):
            self._read -= len(self._text)
            return False
        block = self._form.read(self._text, last)
        if block is None:
            return False
        self._inside = False
        self.malformed += block.malformed
        if not block.calls:
            self._content(self._gap + self._text[: block.end])
        for name, arguments in block.calls:
            identifier = f"{self._prefix}_{self._count}"
            self._out.append(ToolCall(id=identifier, name=name, arguments=arguments))
            self._count += 1
            self._before = Before(blank=False, line=False, behind=True)
        self._text = self._text[block.end :]
        return True

    def _content(self, text: str) -> None:
        if not text:
            return
        self._before = Before(
            blank=self._before.blank and text.isspace(),
            line=text.endswith("\n"),
            behind=self._before.behind and text.isspace(),
        )
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if self._count and not self._said:
            body = body.lstrip()
        if body:
            self._said = True
            self._out.append(body)


def tag_start(text: str, tag: str, last: bool) -> Start:
    """Where a block begins that an opening tag begins."""
    at = text.find(tag)
    if at >= 0:
        return Start(at, at)
    return Start(len(text) - (0 if last else overlap(text, tag)))
