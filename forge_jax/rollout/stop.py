"""Finds stop strings in a stream of token ids.

Token ids flow in, the number of tokens to keep flows out. The outcome depends on the
tokens alone, never on how they were cut into calls.
"""

from collections.abc import Sequence

from forge_jax.models.tokenizer import Detokenizer, Tokenizer


class StopStrings:
    """Watches the text of one completion for the first of several strings."""

    def __init__(self, strings: tuple[str, ...], tokenizer: Tokenizer):
        self._strings = strings
        self._text = Detokenizer(tokenizer)
        self._keep = max(map(len, strings)) - 1  # characters that may begin a stop string
        self._tail = ""

    def feed(self, ids: Sequence[int]) -> tuple[int, str] | None:
        """Reads tokens up to the one that completes a stop string.

        Returns how many of `ids` were read and the string, or None if all were read
        and no string is complete.
        """
        for count, token in enumerate(ids, 1):
            found = self._search(self._text.feed([token]))
            if found is not None:
                return count, found
        return None

    def flush(self) -> str | None:
        """The stop string in text that was still held back when the completion ended."""
        return self._search(self._text.flush())

    def _search(self, text: str) -> str | None:
        window = self._tail + text
        places = [(window.find(s), s) for s in self._strings if s in window]
        if places:
            return min(places, key=lambda place: place[0])[1]
        self._tail = window[max(0, len(window) - self._keep) :] if self._keep else ""
        return None
