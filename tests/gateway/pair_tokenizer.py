"""A tokenizer under which one text has many tokenisations, as real ones have."""

import random
from collections.abc import Iterable
from pathlib import Path

from forge_jax.models.tokenizer import ByteTokenizer

BASE = ByteTokenizer()
PAIRS = [b"th", b"he", b" a", b'":', b"\n\n", b"</", b'{"', b"  ", b"}\n", b"k1", b"=4", b"er"]
FIRST = BASE.vocab_size


class PairTokenizer:
    """Bytes and some pairs of bytes; encodes greedily, pairs first."""

    vocab_size = FIRST + len(PAIRS)

    def encode(self, text: str) -> list[int]:
        return joined(BASE.encode(text), lambda: True)

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self.piece(i, False) for i in ids).decode("utf-8", "replace")

    def piece(self, index: int, first: bool) -> bytes:
        return PAIRS[index - FIRST] if index >= FIRST else BASE.piece(index, first)

    def special_id(self, text: str) -> int | None:
        return BASE.special_id(text)

    def save(self, folder: Path) -> None:
        raise NotImplementedError


def sampled(text: str, rng: random.Random) -> list[int]:
    """One of the tokenisations of `text`, seldom the greedy one."""
    return joined(BASE.encode(text), lambda: rng.random() < 0.5)


def joined(ids: list[int], pair_up) -> list[int]:
    out: list[int] = []
    at = 0
    while at < len(ids):
        pair = bytes(ids[at : at + 2]) if max(ids[at : at + 2]) < 256 else b""
        if pair in PAIRS and pair_up():
            out.append(FIRST + PAIRS.index(pair))
            at += 2
        else:
            out.append(ids[at])
            at += 1
    return out
