"""What the outlet says is to go down, and when."""

import numpy as np

from forge_jax.rollout.prefix import Node
from forge_jax.rollout.tiers.outlet import Outlet

ROOT = b"root"


def named(outlet: Outlet, page: int, parent: Node | None = None) -> Node:
    node = Node(b"%d" % page, page, parent)
    outlet.name(node, np.array([page], np.int32))
    return node


def found(outlet: Outlet, *nodes: Node) -> None:
    for node in nodes:
        node.hits += 1
    outlet.hit(nodes)


def everything(name: object, hot: bool) -> bool:
    return True


def test_a_page_that_is_found_twice_in_the_plan_that_fills_it_goes_down_after_that_plan() -> None:
    outlet = Outlet(ROOT, routes=False)
    node = named(outlet, 1)
    found(outlet, node)
    found(outlet, node)
    assert outlet.take(everything) == [], "the call that fills it is not dispatched yet"
    assert outlet.take(everything) == [(node, True)]
    found(outlet, node)
    assert outlet.take(everything) == [], "once is enough"


def test_a_page_that_is_gone_before_it_was_filled_never_goes_down() -> None:
    outlet = Outlet(ROOT, routes=False)
    node, filled = named(outlet, 1), named(outlet, 2)
    outlet.evicted([node])
    assert outlet.take(everything) == []
    assert outlet.take(everything) == []
    outlet.evicted([filled])
    assert outlet.take(everything) == [(filled, False)]


def test_pages_go_down_hot_on_the_second_hit_where_the_tiers_lack_them() -> None:
    outlet = Outlet(ROOT, routes=False)
    node = named(outlet, 1)
    outlet.take(everything)
    found(outlet, node)
    assert outlet.take(everything) == []
    found(outlet, node)
    asked = []
    assert outlet.take(lambda name, hot: asked.append((name, hot))) == []
    assert asked == [((ROOT, node.name), True)]
    found(outlet, node)
    assert outlet.take(everything) == [(node, True)]


def test_a_page_goes_down_with_its_routes_or_not_at_all() -> None:
    outlet = Outlet(ROOT, routes=True)
    node = named(outlet, 1)
    outlet.take(everything)
    outlet.evicted([node])
    assert outlet.take(everything) == []
    node.routes = np.zeros((4, 2, 2), np.int8)
    outlet.evicted([node])
    assert outlet.take(everything) == [(node, False)]


def test_pages_of_before_an_update_are_nobodys() -> None:
    outlet = Outlet(ROOT, routes=False)
    node = named(outlet, 1)
    outlet.take(everything)
    other = outlet.renewed()
    other.evicted([node])
    assert other.take(everything) == []


def test_the_name_of_a_page_is_of_the_weights_and_of_all_tokens_before() -> None:
    def names(root: bytes, *pages: int) -> list[bytes]:
        outlet, nodes = Outlet(root, routes=False), [None]
        for page in pages:
            nodes.append(named(outlet, page, nodes[-1]))
        return [node.name for node in nodes[1:] if node is not None]

    first = names(ROOT, 1, 2)
    assert names(ROOT, 1, 2) == first
    assert not {*names(b"other", 1, 2)} & {*first}
    assert names(ROOT, 3, 2)[1] != first[1]
