"""Finds the recorded completion behind a message or a prompt that comes back.

Clients rewrite almost everything in the history they send back except the ids of tool
calls and items, so those are asked first and the canonical content second. What a client really
changed is found under neither, and is no longer the model's own reply.
"""

from collections.abc import Callable

import numpy as np

from forge_jax.gateway.completion import Completion
from forge_jax.gateway.messages import Message
from forge_jax.types import Rule


class Replies:
    """The finished completions of one session, by what may be known of them later."""

    def __init__(self) -> None:
        self._by_call_id: dict[str, Completion] = {}
        self._by_name: dict[str, Completion] = {}
        # What is said, and what was thought before it (None: whatever that is).
        self._by_key: dict[tuple[object, str | None], tuple[Completion, ...]] = {}
        self._by_end: dict[tuple[int, int], list[Completion]] = {}
        self._lengths: dict[int, int] = {}  # prompt and output together -> how many such

    def add(self, completion: Completion) -> None:
        """Makes a finished completion known."""
        self._by_name[completion.name] = completion
        for call in completion.message.calls:
            self._by_call_id[call.id] = completion
        for key in _said_and_thought(completion):
            self._by_key[key] = (*self._by_key.get(key, ()), completion)
        end = _end(completion)
        if end is not None:
            self._by_end.setdefault(end, []).append(completion)
            self._lengths[end[0]] = self._lengths.get(end[0], 0) + 1

    def discard(self, completion: Completion) -> None:
        """Forgets a completion; one that is not known is no mistake."""
        self._by_name.pop(completion.name, None)
        for call in completion.message.calls:
            self._by_call_id.pop(call.id, None)
        for key in _said_and_thought(completion):
            left = tuple(c for c in self._by_key.pop(key, ()) if c is not completion)
            if left:
                self._by_key[key] = left
        end = _end(completion)
        if end is not None and _remove(self._by_end, end, completion):
            self._lengths[end[0]] -= 1
            if self._lengths[end[0]] == 0:
                del self._lengths[end[0]]

    def find(self, message: Message) -> tuple[tuple[Completion, ...], Rule]:
        """Completions that `message` may be, the newest last, and by which rule; () if it is
        none of ours.

        Text may be missing beside known calls (some clients drop it), and so may a thought, but
        neither of them nor a call may differ.
        """
        by_call = (self._by_call_id[c.id] for c in message.calls if c.id in self._by_call_id)
        rule, known = Rule.CALL_ID, next(by_call, None)
        if known is None:
            rule, known = Rule.ITEM_ID, self._by_name.get(message.reply)
        thought = message.thought.strip()
        if known is None:
            found = self._by_key.get((message.key, thought or None), ())
            if not found:
                return (), Rule.FOREIGN
            told = found[-1].message.key == message.key
            return found, Rule.CONTENT if told else Rule.CONTENT_WITH_STOP
        if thought and thought != known.message.thought.strip():
            return (), Rule.FOREIGN
        if message.key in _keys(known):
            return (known,), rule
        calls = known.message.key[1]
        if calls and message.key == ("", calls):
            return (known,), Rule.TEXT_DROPPED
        return (), Rule.FOREIGN

    def parent(
        self, prompt: np.ndarray, gone_on: Callable[[Completion], bool]
    ) -> Completion | None:
        """The completion whose prompt and output are the longest beginning of `prompt`; of several
        alike the newest that no call has `gone_on` from."""
        for length in sorted((n for n in self._lengths if n <= len(prompt)), reverse=True):
            alike = [
                completion
                for completion in reversed(self._by_end.get((length, int(prompt[length - 1])), ()))
                if _begins(prompt, completion)
            ]
            if alike:
                return next((c for c in alike if not gone_on(c)), alike[0])
        return None


def _begins(prompt: np.ndarray, completion: Completion) -> bool:
    """Whether `prompt` begins with prompt and output of a completion."""
    fed, output = completion.request.prompt, completion.output
    return np.array_equal(prompt[: len(fed)], fed) and np.array_equal(
        prompt[len(fed) : len(fed) + len(output)], output
    )


def _keys(completion: Completion) -> tuple[object, ...]:
    """What the reply looks like when it comes back as text."""
    text, calls = completion.message.key
    thought = completion.message.thought.strip()
    if not text and not calls and thought:  # which some clients are told as the text
        return ((text, calls), (thought, calls))
    if completion.stop_text is None:
        return ((text, calls),)
    # Some clients put back the stop string at which the text was cut.
    told = completion.message.content
    return ((text, calls), ((told + completion.stop_text).strip(), calls))


def _said_and_thought(completion: Completion) -> set[tuple[object, str | None]]:
    thought = completion.message.thought.strip()
    return {(key, said) for key in _keys(completion) for said in (None, thought or None)}


def _end(completion: Completion) -> tuple[int, int] | None:
    """Length of prompt and output, and the last token; None if nothing was sampled."""
    output = completion.output
    if len(output) == 0:
        return None
    return len(completion.request.prompt) + len(output), int(output[-1])


def _remove(index: dict, key: object, completion: Completion) -> bool:
    known = index.get(key, [])
    if completion not in known:
        return False
    known.remove(completion)
    if not known:
        del index[key]
    return True
