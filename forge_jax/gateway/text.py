"""The text of a completion as its tokens arrive, without what ended it.

Chunks flow in, text flows out that nothing later can change: no half of a UTF-8
sequence, nothing that may be the beginning of a stop string.
"""

from forge_jax.gateway.parsers.protocol import overlap
from forge_jax.models.tokenizer import Detokenizer, Tokenizer
from forge_jax.types import Chunk, Sampling


class TextReader:
    """Reads one completion drawn under `sampling`."""

    def __init__(self, tokenizer: Tokenizer, sampling: Sampling):
        self._detokenizer = Detokenizer(tokenizer)
        self._ends = frozenset(() if sampling.ignore_eos else sampling.stop_ids)
        self._stops = sampling.stop
        self._held = ""

    def feed(self, chunk: Chunk) -> str:
        """Takes the next tokens; with the last of them gives all that is left."""
        ids = chunk.ids.tolist()
        if ids and ids[-1] in self._ends:
            ids.pop()
        text = self._detokenizer.feed(ids)
        if chunk.finish is None and not self._stops:
            return text
        text = self._held + text
        if chunk.finish is None:
            held = overlap(text, *self._stops)
            self._held = text[len(text) - held :]
            return text[: len(text) - held]
        self._held = ""
        text += self._detokenizer.flush()
        return text if chunk.stop_text is None else text.partition(chunk.stop_text)[0]
