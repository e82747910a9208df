"""A cache of blocks as the simulator sees it: so many tokens, the oldest leaf goes first.

Paths of blocks flow in; what came and went is told to a listener. Invariant: blocks in the
cache and tokens reserved never exceed the capacity, and a block that is pinned stays.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

from forge_jax.rollout.router.index import Block


class Cache:
    """Blocks, pinned or idle; idle ones are in the order in which they may go."""

    def __init__(
        self,
        capacity: int,
        got: Callable[[Hashable], None],
        lost: Callable[[Hashable], None],
    ):
        self._free = capacity
        self._got = got
        self._lost = lost
        self._sizes: dict[Hashable, int] = {}
        self._pins: dict[Hashable, int] = {}
        self._idle: OrderedDict[Hashable, None] = OrderedDict()

    def prefix(self, blocks: Sequence[Block]) -> int:
        """Tokens of the longest prefix that is here."""
        tokens = 0
        for block in blocks:
            if block.key not in self._sizes:
                break
            tokens += block.tokens
        return tokens

    def reserve(self, tokens: int) -> bool:
        """Sets `tokens` aside, at the cost of idle blocks; False if it cannot, and then as many
        as there were may be gone."""
        while self._free < tokens and self._idle:
            key, _ = self._idle.popitem(last=False)
            self._free += self._sizes.pop(key)
            self._lost(key)
        if self._free < tokens:
            return False
        self._free -= tokens
        return True

    def release(self, tokens: int) -> None:
        """Gives back what was set aside."""
        self._free += tokens

    def insert(self, blocks: Sequence[Block]) -> None:
        """Puts a path here, or as much of its beginning as there is place for."""
        known = [block for block in blocks if block.key in self._sizes]
        self.pin(known)
        made = []
        for block in blocks:
            if block.key in self._sizes:
                continue
            if not self.reserve(block.tokens):
                break
            self._sizes[block.key] = block.tokens
            self._pins[block.key] = 1
            self._got(block.key)
            made.append(block)
        self.unpin([*known, *made])

    def pin(self, blocks: Sequence[Block]) -> None:
        """Blocks that are here stay until they are unpinned as often."""
        for block in blocks:
            pins = self._pins.get(block.key, 0)
            if pins == 0:
                del self._idle[block.key]
            self._pins[block.key] = pins + 1

    def unpin(self, blocks: Sequence[Block]) -> None:
        """In the order of a path. Deepest first they become the newest, so that a block is
        always newer than those behind it: the oldest is a leaf."""
        for block in reversed(blocks):
            self._pins[block.key] -= 1
            if self._pins[block.key] == 0:
                del self._pins[block.key]
                self._idle[block.key] = None
