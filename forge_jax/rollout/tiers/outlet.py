"""Which pages of the prefix tree are to go down, noted before anything writes over them.

Nodes that are found or evicted flow in, those to copy flow out. Invariant: a node that comes out
has its name, its routes where any are recorded, and a page that no call dispatched yet writes to.
"""

from collections.abc import Callable, Iterable

import numpy as np

from forge_jax.rollout.keys import next_key
from forge_jax.rollout.prefix import Node
from forge_jax.rollout.tiers.host import Name

HOT = 2  # hits after which a page is kept below though it stays on the device


class Outlet:
    """Names nodes for the tiers below; `root` is the digest of the present weights."""

    def __init__(self, root: bytes, routes: bool):
        """With `routes`, nodes whose routes are not known yet are no use below."""
        self.root = root
        self._routes = routes
        self._hot: list[Node] = []
        self._gone: list[Node] = []
        self._young: set[Node] = set()  # the calls that fill them are not dispatched yet

    def renewed(self) -> "Outlet":
        """One for the same weights that knows none of the nodes there are now: calls that were
        to fill some of them may never run."""
        return Outlet(self.root, self._routes)

    def name(self, node: Node, ids: np.ndarray) -> None:
        """Names a node with tokens `ids`; its parent, if it has one, was named here."""
        before = self.root if node.parent is None else node.parent.name
        node.name, node.outlet = next_key(before, ids), self
        self._young.add(node)

    def hit(self, nodes: Iterable[Node]) -> None:
        self._hot += [node for node in nodes if node.hits >= HOT and not node.kept]

    def evicted(self, nodes: Iterable[Node]) -> None:
        self._gone += [node for node in nodes if node.outlet is self]

    def take(self, lacks: Callable[[Name, bool], bool]) -> list[tuple[Node, bool]]:
        """The nodes to copy now, before what was planned is dispatched, and whether each is hot;
        `lacks` says whether the tiers are to have a page of this name that is hot or is not."""
        noted = [(node, True) for node in self._hot] + [(node, False) for node in self._gone]
        young, self._young = self._young, set()
        self._hot = [node for node in self._hot if node in young]  # is there next time
        self._gone = []
        found = []
        for node, hot in noted:
            known = node.routes is not None or not self._routes
            if known and not node.kept and node not in young and lacks((self.root, node.name), hot):
                node.kept = True
                found.append((node, hot))
        return found
