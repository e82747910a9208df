"""Text to token ids and back: bytes, or any `tokenizer.json`.

Each id stands for some bytes, whatever follows it, and text is those bytes read as
UTF-8. So decoding a stream piece by piece gives the text of the whole, and what is
not UTF-8, or no id at all, becomes U+FFFD and never an exception.
"""

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from forge_jax.config import UserError

REPLACEMENT = "\ufffd".encode()
BYTE_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 256, 257, 258
# Decoders under which the text of an id depends on nothing after it.
STREAMABLE = {"ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}


class Tokenizer(Protocol):
    """What the rest of the stack needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, nothing added; special tokens in the text are recognised."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens included; U+FFFD where there is none."""
        ...

    def piece(self, index: int, first: bool) -> bytes:
        """Bytes an id adds to a text (`first`: that it begins one with)."""
        ...

    def special_id(self, text: str) -> int | None:
        """Id of the special token written `text`, if there is one."""
        ...

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids that mark how a text is put together, and are never meant as text."""
        ...

    def save(self, folder: Path) -> None:
        """Writes `tokenizer.json` into an existing folder."""
        ...


class ByteTokenizer:
    """UTF-8 bytes are their own ids; three special tokens follow them."""

    vocab_size = 256 + len(BYTE_SPECIALS)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in re.split("|".join(f"({re.escape(s)})" for s in BYTE_SPECIALS), text):
            if part in BYTE_SPECIALS:
                ids.append(256 + BYTE_SPECIALS.index(part))
            elif part:
                ids.extend(_sound(part).encode())
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return _text(self, ids)

    def piece(self, index: int, first: bool) -> bytes:
        if 0 <= index < 256:
            return bytes((index,))
        if 256 <= index < self.vocab_size:
            return BYTE_SPECIALS[index - 256].encode()
        return REPLACEMENT

    def special_id(self, text: str) -> int | None:
        return 256 + BYTE_SPECIALS.index(text) if text in BYTE_SPECIALS else None

    @property
    def control_ids(self) -> frozenset[int]:
        return frozenset(range(256, self.vocab_size))

    def save(self, folder: Path) -> None:
        """Writes the same tokenizer as a merge-less byte-level BPE, for other libraries."""
        vocab = {char: byte for byte, char in _byte_alphabet().items()}
        same = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        same.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        same.decoder = decoders.ByteLevel()
        same.add_special_tokens(list(BYTE_SPECIALS))
        same.save(str(folder / "tokenizer.json"))


class JsonTokenizer:
    """Any `tokenizer.json`, as the `tokenizers` library reads it.

    Bytes of a broken byte-fallback run are replaced one sequence at a time, as in
    byte-level tokenizers, where the library would replace the whole run.
    """

    def __init__(self, path: Path):
        """Raises UserError where the file is missing, broken, or cannot be streamed."""
        try:
            self._json = path.read_text(encoding="utf-8")
            self._inner = tokenizers.Tokenizer.from_str(self._json)
        except OSError as error:
            raise UserError(f"tokenizer {path}: {error.strerror}") from error
        except Exception as error:  # the library raises bare Exception on a bad file
            raise UserError(f"tokenizer {path}: {error}") from error
        # Settings for batches of training data, which would cut or pad a prompt.
        self._inner.no_truncation()
        self._inner.no_padding()
        kinds = _decoder_kinds(json.loads(self._json).get("decoder"))
        if kinds - STREAMABLE:
            raise UserError(f"tokenizer {path}: unsupported decoder {sorted(kinds - STREAMABLE)}")
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        added = self._inner.get_added_tokens_decoder()
        self._added = {token.content: i for i, token in added.items()}
        self.control_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = max(self._inner.get_vocab(with_added_tokens=True).values()) + 1
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self._alphabet = {char: byte for byte, char in _byte_alphabet().items()}

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(_sound(text), add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        return _text(self, ids)

    def piece(self, index: int, first: bool) -> bytes:
        known = self._pieces.get((index, first))
        if known is None:
            known = self._pieces[index, first] = self._read(index, first)
        return known

    def special_id(self, text: str) -> int | None:
        return self._added.get(text)

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text(self._json, encoding="utf-8")

    def _read(self, index: int, first: bool) -> bytes:
        token = self._inner.id_to_token(index) if 0 <= index < self.vocab_size else None
        if token is None:
            return REPLACEMENT
        if self._byte_level:
            raw = [self._alphabet.get(char) for char in token]
            if token in self._added or None in raw:
                return token.encode()
            return bytes(raw)  # type: ignore[arg-type]
        if self._byte_fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            return bytes((int(token[3:5], 16),))
        alone = self._inner.decode([index], skip_special_tokens=False)
        if first:
            return alone.encode()
        # What it adds after a copy of itself: leading-space rules concern the first alone.
        twice = self._inner.decode([index, index], skip_special_tokens=False)
        return twice[len(alone) :].encode()


class Detokenizer:
    """Text of a stream of ids: emits only what later ids cannot change."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True

    def feed(self, ids: Sequence[int]) -> str:
        """Takes the next ids; gives the text that is now certain, perhaps none."""
        raw = b""
        for index in ids:
            raw += self._tokenizer.piece(int(index), self._first)
            self._first = False
        return self._utf8.decode(raw)

    def flush(self) -> str:
        """Ends the stream: an unfinished UTF-8 sequence becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)


def _text(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    raw = b"".join(tokenizer.piece(int(index), i == 0) for i, index in enumerate(ids))
    return raw.decode("utf-8", "replace")


def _sound(text: str) -> str:
    """`text` with lone surrogates, which JSON can smuggle in, as U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _decoder_kinds(decoder: dict | None) -> set[str]:
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return set().union(*(_decoder_kinds(d) for d in decoder["decoders"]))
    return {decoder["type"]}


def _byte_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}
