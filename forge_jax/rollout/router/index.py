"""Who holds which block of which prefix.

Blocks that a holder got and lost flow in, lengths of prefixes flow out. A block's key is
chained over everything before it (weights, adapter, tokens), so a key stands for a whole
prefix, and keys of other weights are never asked for.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Block(NamedTuple):
    """A stretch of tokens in its context."""

    key: Hashable
    tokens: int


class PrefixIndex:
    """Blocks by holder; a block that was added twice is held until it is discarded twice."""

    def __init__(self) -> None:
        self._holders: dict[Hashable, set[str]] = {}
        self._blocks: defaultdict[str, Counter[Hashable]] = defaultdict(Counter)

    def add(self, holder: str, key: Hashable) -> None:
        held = self._blocks[holder]
        held[key] += 1
        if held[key] == 1:
            self._holders.setdefault(key, set()).add(holder)

    def discard(self, holder: str, key: Hashable) -> None:
        """Raises KeyError if `holder` does not have the block."""
        held = self._blocks[holder]
        if held[key] > 1:
            held[key] -= 1
            return
        del held[key]
        self._forget(holder, key)

    def clear(self, holder: str) -> None:
        """`holder` has lost everything."""
        for key in self._blocks.pop(holder, ()):
            self._forget(holder, key)

    def held(self, holder: str) -> int:
        """How many different blocks it has."""
        return len(self._blocks[holder])

    def prefixes(self, blocks: Sequence[Block]) -> dict[str, int]:
        """Tokens of the longest prefix that each holder has; holders of nothing are left out."""
        found: dict[str, int] = {}
        here: set[str] = set()
        length = 0
        for place, block in enumerate(blocks):
            holders = self._holders.get(block.key, set())
            still = holders & here if place else holders
            if len(still) < len(here):
                for gone in here - still:
                    found[gone] = length
            here = still
            if not here:
                return found
            length += block.tokens
        found.update(dict.fromkeys(here, length))
        return found

    def _forget(self, holder: str, key: Hashable) -> None:
        holders = self._holders[key]
        holders.discard(holder)
        if not holders:
            del self._holders[key]
