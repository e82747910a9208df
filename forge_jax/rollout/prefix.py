"""The prefix tree: pages that hold what any request with the same beginning can read.

Keys of full pages flow in, nodes with their pages flow out. Invariant: whoever holds a node
holds all nodes above it, so a node that nobody holds has nobody below it either, and leaves can
be evicted until no such node is left.
"""

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from forge_jax.rollout.pages import PagePool


@dataclass(eq=False, slots=True)
class Node:
    """One full page in the tree; what is in it never changes."""

    key: bytes
    page: int
    parent: "Node | None"
    children: dict[bytes, "Node"] = field(default_factory=dict)
    refs: int = 0  # running requests that read it
    hits: int = 0  # requests that found it
    used: int = 0  # when it was last found or let go, on the tree's own clock
    # int[page, layers, k], the experts of its tokens. None: not recorded, or not read yet.
    routes: np.ndarray | None = None
    name: bytes = b""  # its key in the tiers below the device, if there are any
    outlet: object = None  # that named it
    kept: bool = False  # it was copied there


class PrefixTree:
    """Owns the nodes; their pages were taken from `pool` and go back there."""

    def __init__(self, pool: PagePool):
        self._pool = pool
        self._nodes: dict[bytes, Node] = {}
        self._clock = itertools.count(1)
        self._ties = itertools.count()
        self._leaves: list[tuple[int, int, Node]] = []  # a heap; some entries are outdated
        self._held = 0

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def locked(self) -> int:
        """Nodes that somebody holds."""
        return self._held

    @property
    def evictable(self) -> int:
        """Nodes that nobody holds."""
        return len(self._nodes) - self._held

    def get(self, key: bytes) -> Node | None:
        return self._nodes.get(key)

    def match(self, keys: Sequence[bytes]) -> list[Node]:
        """The nodes of the longest beginning of `keys` that is in the tree."""
        found = []
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                break
            found.append(node)
        return found

    def hold(self, nodes: Iterable[Node]) -> None:
        """Keeps nodes from eviction until they are let go as often."""
        for node in nodes:
            self._held += node.refs == 0
            node.refs += 1

    def hit(self, nodes: Iterable[Node]) -> None:
        """Notes that a request has found nodes."""
        now = next(self._clock)
        for node in nodes:
            node.hits += 1
            node.used = now

    def release(self, nodes: Iterable[Node]) -> None:
        now = next(self._clock)
        for node in nodes:
            assert node.refs > 0, f"page {node.page} is not held"
            node.refs -= 1
            node.used = now
            self._held -= node.refs == 0
            self._note(node)

    def insert(self, parent: Node | None, key: bytes, page: int) -> Node:
        """A new node, held once by whoever had taken `page`; `parent` must be held."""
        assert key not in self._nodes, f"page {page} is in the tree already"
        node = Node(key, page, parent, refs=1, used=next(self._clock))
        self._nodes[key] = node
        self._held += 1
        if parent is not None:
            parent.children[key] = node
        return node

    def evict(self, count: int) -> list[Node]:
        """Removes up to `count` nodes that nobody holds, the longest unused leaves first, and
        frees their pages."""
        gone: list[Node] = []
        while len(gone) < count and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            if used == node.used and self._loose(node):
                del self._nodes[node.key]
                if node.parent is not None:
                    del node.parent.children[node.key]
                    self._note(node.parent)
                gone.append(node)
        self._pool.give(node.page for node in gone)
        return gone

    def _note(self, node: Node) -> None:
        if self._loose(node):
            heapq.heappush(self._leaves, (node.used, next(self._ties), node))
            if len(self._leaves) > 64 + 4 * len(self._nodes):
                fresh = {entry[2]: entry for entry in self._leaves if entry[0] == entry[2].used}
                self._leaves = [entry for node, entry in fresh.items() if self._loose(node)]
                heapq.heapify(self._leaves)

    def _loose(self, node: Node) -> bool:
        """Whether a node can be evicted."""
        return node.refs == 0 and not node.children and self._nodes.get(node.key) is node
