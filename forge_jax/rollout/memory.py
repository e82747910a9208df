"""Which pages each running request of a place has.

Jobs flow in, stays with their pages flow out and back. Invariant: every page but the scratch
page is free, in the prefix tree, or of one stay alone; a page in the tree is never written.
"""

from collections.abc import Iterable

import numpy as np

from forge_jax.config import RolloutConfig
from forge_jax.rollout.jobs import Job, Stay
from forge_jax.rollout.keys import block_keys, next_key
from forge_jax.rollout.pages import PagePool
from forge_jax.rollout.prefix import Node, PrefixTree
from forge_jax.rollout.tiers.outlet import Outlet


class Memory:
    """Owns the pool and the tree; `root` is the key of the present weights."""

    def __init__(self, cfg: RolloutConfig, root: bytes, place: int = 0):
        self.pool = PagePool(cfg.place_pages, place)
        self.tree = PrefixTree(self.pool)
        self.root = root
        self.outlet: Outlet | None = None  # to tiers below, if there are any
        self._cfg, self._place = cfg, place
        self._coming: dict[bytes, Stay] = {}  # pages that a running prefill will put in the tree

    @property
    def available(self) -> int:
        """Pages that are free or can be."""
        return self.pool.free + self.tree.evictable

    def renew(self, root: bytes) -> None:
        """Goes on with other weights: nothing that is in the tree now is found any more."""
        self.root = root
        self._coming.clear()

    def awaits(self, job: Job) -> bool:
        """Whether a running prefill computes more of its prefix than the tree has."""
        if not self._cfg.prefix_cache or job.scoring:
            return False
        if job.awaited in self._coming:
            return True
        keys = self._keys(job)
        found = len(self.tree.match(keys))
        job.awaited = keys[found] if found < len(keys) else b""
        return job.awaited in self._coming

    def comes(self, key: bytes) -> bool:
        """Whether a running prefill computes a page."""
        return key in self._coming

    def saves(self, job: Job) -> int:
        """Tokens of a job that the tree has, or a running prefill computes."""
        keys = self._keys(job) if self._cfg.prefix_cache and not job.scoring else []
        found = len(self.tree.match(keys))
        while found < len(keys) and keys[found] in self._coming:
            found += 1
        return found * self._cfg.page

    def open(self, job: Job, reserve: int) -> Stay | None:
        """Pages for all that is known of a job; None if fewer than `reserve` would be left."""
        page = self._cfg.page
        keys = self._keys(job) if self._cfg.prefix_cache else []
        # What is scored is computed, whoever has computed it before.
        nodes = [] if job.scoring else self.tree.match(keys)
        self.tree.hold(nodes)
        need = -(-job.length // page) - len(nodes)
        if need + reserve > self.available:
            self.tree.release(nodes)
            return None
        self.tree.hit(nodes)
        if self.outlet is not None:
            self.outlet.hit(nodes)
        stay = Stay(
            job=job,
            place=self._place,
            nodes=nodes,
            found=len(nodes),
            target=job.length - 1,
            filled=len(nodes) * page,
            # Its program's bits need not be those of others.
            publishes=self._cfg.prefix_cache and not (job.scoring and self._cfg.deterministic),
            pages=self.take(need),
        )
        for key in keys[len(nodes) :] if stay.publishes else ():
            self._coming.setdefault(key, stay)
        return stay

    def grow(self, stay: Stay, tokens: int) -> bool:
        """Sees that a stay has pages for its first `tokens`; False if there are not enough."""
        need = -(-tokens // self._cfg.page) - len(stay.nodes) - len(stay.pages)
        if need > self.available:
            return False
        if need > 0:
            stay.pages += self.take(need)
        return True

    def publish(self, stay: Stay, filled: int) -> list[tuple[int, Node]]:
        """Puts the full pages among a stay's first `filled` tokens in the tree.

        Returns the nodes that are new, with the number of the page in the sequence. Where the
        tree has such a page the stay reads that one and gives its own back.
        """
        new: list[tuple[int, Node]] = []
        job, page = stay.job, self._cfg.page
        while stay.publishes and (len(stay.nodes) + 1) * page <= filled:
            number = len(stay.nodes)
            parent = stay.nodes[-1] if stay.nodes else None
            ids = job.tokens[number * page : (number + 1) * page]
            key = next_key(self.root if parent is None else parent.key, ids)
            self._arrived(key, stay)
            node, own = self.tree.get(key), stay.pages.pop(0)
            if node is None:
                node = self.insert(parent, key, own, ids)
                new.append((number, node))
            else:
                self.tree.hold([node])
                self.pool.give([own])
            stay.nodes.append(node)
        return new

    def insert(self, parent: Node | None, key: bytes, page: int, ids: np.ndarray) -> Node:
        """A new node of the tree with tokens `ids`, see `PrefixTree.insert`."""
        node = self.tree.insert(parent, key, page)
        if self.outlet is not None:
            self.outlet.name(node, ids)
        return node

    def close(self, stay: Stay) -> None:
        """Takes all pages of a stay back."""
        stay.over = True
        for key in stay.job.keys:
            self._arrived(key, stay)
        self.tree.release(stay.nodes)
        self.pool.give(stay.pages)

    def take(self, count: int) -> list[int]:
        """That many pages, of which there must be as many available."""
        if count > self.pool.free:
            gone = self.tree.evict(count - self.pool.free)
            if self.outlet is not None:
                self.outlet.evicted(gone)
        return self.pool.take(count)

    def audit(self, stays: Iterable[Stay]) -> None:
        """Raises AssertionError unless every page has one place."""
        own = sum(len(stay.pages) for stay in stays)
        tree = self.tree
        assert self.pool.free + tree.evictable + tree.locked + own == self.pool.total, (
            f"{self.pool.free} pages are free, {tree.evictable} evictable, {tree.locked} locked "
            f"and {own} of running requests, of {self.pool.total}"
        )

    def _keys(self, job: Job) -> list[bytes]:
        """Keys of the full pages before a job's last token, which is always computed again."""
        ids: np.ndarray = job.tokens[: job.length - 1]
        if job.root != self.root or len(job.keys) != len(ids) // self._cfg.page:
            job.root, job.keys = self.root, block_keys(self.root, ids, self._cfg.page)
        return job.keys

    def _arrived(self, key: bytes, stay: Stay) -> None:
        if self._coming.get(key) is stay:
            del self._coming[key]
