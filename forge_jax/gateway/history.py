"""Writes a conversation as the exact tokens the model saw and sampled.

A conversation flows in, the prompt's token ids flow out. A reply the session recorded
is never tokenised again: its place in the rendered text is marked, the text around
the marks is tokenised piece by piece, and the sampled ids are put between. So the
prompt of a later call begins with prompt and output of the earlier one wherever the
template keeps its history, and differs exactly where the template or the client
changed something.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forge_jax.gateway.completion import Completion, Place
from forge_jax.gateway.messages import Conversation, Message, ToolCall
from forge_jax.gateway.parsers.thoughts import END_THINK, THINK
from forge_jax.models.chat import Chat, TemplateError
from forge_jax.types import Rule

# Private-use characters around a number that no client can guess.
SECRET = secrets.token_hex(8)
MARK = re.compile(f"\ue000{SECRET}-[0-9]+(?:-thought)?\ue001")


@dataclass(frozen=True, kw_only=True, eq=False)
class Returned:
    """An assistant message that came back, and how it was known."""

    rule: Rule
    place: Place | None = None  # of the completion whose sampled tokens stand in the prompt
    tokens: int = 0  # of these
    retokenised: int = 0  # of these, how many their text would not have become again


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """What is fed to the engine."""

    ids: np.ndarray  # i32[P]
    text: str
    replies: tuple[Returned, ...] = ()  # its assistant messages, in order


@dataclass(frozen=True)
class Slot:
    """A message that is a recorded reply: the completions it may be, and its marks."""

    index: int
    completions: tuple[Completion, ...]
    raw: str  # the reply with everything that was sampled

    @property
    def text_mark(self) -> str:
        return f"\ue000{SECRET}-{self.index}\ue001"

    @property
    def thought_mark(self) -> str:
        return f"\ue000{SECRET}-{self.index}-thought\ue001"

    @property
    def cut(self) -> bool:
        """The reply is a thought without an end."""
        return END_THINK not in self.raw and self.completions[-1].message.thought != ""

    @property
    def thinks(self) -> bool:
        """The reply begins with a thought, whole or cut; tags further on are its text."""
        opened = self.completions[-1].opened or self.raw.lstrip().startswith(THINK)
        return self.cut or (opened and END_THINK in self.raw)

    def message(self, calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
        """The message with marks for content, as the template is to render it, and, for one
        that asks for them, the names of its `calls`."""
        content = "" if self.cut else self.text_mark
        if self.thinks:
            content = f"{THINK}\n{self.thought_mark}\n{END_THINK}\n\n{content}"
        message = {"role": "assistant", "content": content}
        named = [replace(call, arguments="{}").wire() for call in calls]
        return {**message, "tool_calls": named} if named else message

    def region(
        self, text: str, marks: Mapping[str, Sequence[int]], end_of_turn: str = ""
    ) -> tuple[int, int] | None:
        """Where the reply stands in `text`; None if the template did not keep all of it.

        `marks`: where the marks of all replies stand. `end_of_turn` ends it where its calls are
        written behind the marks.
        """
        last = self.thought_mark if self.cut else self.text_mark
        found = marks.get(last, ())
        if len(found) != 1:
            return None
        begin, end = found[0], found[0] + len(last)
        if end_of_turn:
            end = text.find(end_of_turn, end)
            if end < 0:
                return None
        if not self.thinks:
            return begin, end
        thoughts = marks.get(self.thought_mark, ())
        if not thoughts or thoughts[0] > begin:
            return None
        thought = thoughts[0]
        if not self.raw.lstrip().startswith(THINK):
            return thought, end  # the tag belongs to the header before the reply
        opening = text.rfind(THINK, 0, thought)
        if opening < 0 or text[opening + len(THINK) : thought].strip():
            return None
        return opening, end


class _Writer:
    """Puts rendered text and sampled ids together, piece by piece."""

    def __init__(self, chat: Chat, encode: Callable[[str], np.ndarray]):
        self._end_of_turn = chat.format.end_of_turn
        self._end_id = chat.stop_ids[0]
        self._encode = encode
        self._closed = False  # the reply written last has its own end of turn
        self._ids = np.zeros(1024, np.int32)  # i32[more than P], grown as needed
        self._length = 0  # P
        self._text: list[str] = []
        # By the id of completions that messages may be: these by the length of their prompts.
        self._alike: dict[int, dict[int, list[Completion]]] = {}

    def text(self, piece: str) -> None:
        """Appends rendered text, less an end of turn that the reply before it has."""
        if self._closed and piece.startswith(self._end_of_turn):
            whole = self._encode(piece)
            piece = piece[len(self._end_of_turn) :]
            # Where the token stands alone, the rest is tokenised in its sight.
            self._append(whole[1:] if whole[0] == self._end_id else self._encode(piece))
        else:
            self._append(self._encode(piece))
        self._text.append(piece)

    def reply(self, slot: Slot) -> Completion:
        """Appends what was sampled: behind exactly these ids if possible, else the newest."""
        before = self._ids[: self._length]
        exact = (c for c in self._as_long(slot) if np.array_equal(c.request.prompt, before))
        chosen = next(exact, slot.completions[-1])
        output = chosen.output
        self._closed = len(output) > 0 and int(output[-1]) == self._end_id
        self._append(output)
        self._text.append(slot.raw)
        return chosen

    def _as_long(self, slot: Slot) -> Sequence[Completion]:
        """Of several completions those whose prompt has the length of all that is written."""
        if len(slot.completions) == 1:
            return ()
        alike = self._alike.setdefault(id(slot.completions), {})
        if not alike:
            for completion in slot.completions:
                alike.setdefault(len(completion.request.prompt), []).append(completion)
        return alike.get(self._length, ())

    def _append(self, ids: np.ndarray) -> None:
        end = self._length + len(ids)
        if end > len(self._ids):
            grown = np.zeros(2 * end, np.int32)
            grown[: self._length] = self._ids[: self._length]
            self._ids = grown
        self._ids[self._length : end] = ids
        self._length = end

    def ids(self) -> np.ndarray:
        """i32[P], all ids so far."""
        return self._ids[: self._length].copy()

    def plain(self) -> str:
        """The text so far, sampled replies as they were."""
        return "".join(self._text)


def write_prompt(
    chat: Chat,
    conversation: Conversation,
    find: Callable[[Message], tuple[tuple[Completion, ...], Rule]],
    encode: Callable[[str], np.ndarray],
) -> Prompt:
    """The prompt of a conversation; `find` knows the session's replies.

    Raises TemplateError where the template refuses the messages.
    """
    slots: list[Slot] = []
    rules: dict[int, Rule] = {}
    for index, message in enumerate(conversation.messages):
        if message.role == "assistant":
            completions, rules[index] = find(message)
            if completions:
                slots.append(Slot(index, completions, completions[-1].raw_text))
    text, places = _marked(chat, conversation, slots)
    writer, cursor = _Writer(chat, encode), 0
    spliced: dict[int, Completion] = {}
    for slot, begin, end in places:
        writer.text(text[cursor:begin])
        spliced[slot.index] = writer.reply(slot)
        cursor = end
    writer.text(text[cursor:])
    return Prompt(ids=writer.ids(), text=writer.plain(), replies=_returned(rules, spliced))


def _returned(rules: Mapping[int, Rule], spliced: Mapping[int, Completion]) -> tuple[Returned, ...]:
    """Assistant messages by their index, as they came to stand in the prompt."""
    replies = []
    for index, rule in rules.items():
        if index not in spliced:
            replies.append(Returned(rule=Rule.FOREIGN if rule is Rule.FOREIGN else Rule.NOT_KEPT))
            continue
        known = spliced[index]
        replies.append(
            Returned(
                rule=rule,
                place=known.place,
                tokens=len(known.output),
                retokenised=known.retokenised,
            )
        )
    return tuple(replies)


def _marked(
    chat: Chat, conversation: Conversation, slots: Sequence[Slot]
) -> tuple[str, list[tuple[Slot, int, int]]]:
    """The rendered text and where recorded replies stand in it.

    Some templates refuse results of tools behind a reply without calls: they are told of the
    calls. Where one refuses the marks all the same, its text is that of the client's messages.
    """
    called = False
    while True:
        try:
            text = _render(chat, conversation, slots, called)
        except TemplateError:
            if not slots:
                raise
            slots, called = [] if called else slots, True
            continue
        places = _places(slots, text, conversation, chat.format.end_of_turn if called else "")
        if len(places) == len(slots):
            return text, places
        slots = [slot for slot, _, _ in places]


def _render(chat: Chat, conversation: Conversation, slots: Sequence[Slot], called: bool) -> str:
    messages = [message.wire() for message in conversation.messages]
    for slot in slots:
        calls = conversation.messages[slot.index].calls if called else ()
        messages[slot.index] = slot.message(calls)
    return chat.format.render(messages, conversation.tools, True, **conversation.variables)


def _places(
    slots: Sequence[Slot], text: str, conversation: Conversation, end_of_turn: str
) -> list[tuple[Slot, int, int]]:
    """The replies that stand whole and in order in a rendered text, and where; `end_of_turn`:
    calls are written behind the marks, up to this."""
    marks: dict[str, list[int]] = {}
    for found in MARK.finditer(text):  # once, however many replies there are
        marks.setdefault(found.group(), []).append(found.start())
    places, last = [], 0
    for slot in slots:
        calls = conversation.messages[slot.index].calls
        region = slot.region(text, marks, end_of_turn if calls else "")
        if region is not None and region[0] >= last:
            places.append((slot, *region))
            last = region[1]
    return places
