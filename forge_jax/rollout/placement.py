"""Which slot a request gets, and what a bundle of slots reads in common.

Stays by slot flow in, slots and counts of pages flow out. Rows of a bundle read the pages that
all of them begin with once, so requests with the same beginning belong together. Invariant: the
first `common` nodes of a bundle's stays are the same nodes.
"""

from collections.abc import Sequence

from forge_jax.rollout.jobs import Stay


def common(stays: Sequence[Stay]) -> int:
    """Leading nodes that all of `stays` have."""
    first, *others = [stay.nodes for stay in stays]
    size = len(first)
    for nodes in others:
        size = min(size, len(nodes))
        if size and nodes[size - 1] is first[size - 1]:
            continue  # the same node: the same nodes above it
        size = next((i for i in range(size) if nodes[i] is not first[i]), size)
    return size


def seat(stay: Stay, seats: Sequence[Stay | None], bundle: int, mates: bool) -> int:
    """Which of a place's free `seats` a stay gets: beside those with the longest beginning in
    common; else, where there are `mates` to come, in an empty bundle; else the first."""
    free = [slot for slot, owner in enumerate(seats) if owner is None]
    if bundle == 1 or not (mates or stay.nodes):
        return free[0]
    best, longest, empty = free[0], 0, -1
    for slot in free:
        first = slot - slot % bundle
        others = [owner for owner in seats[first : first + bundle] if owner is not None]
        if not others:
            empty = slot if empty < 0 else empty
        elif stay.nodes:
            shared = common([stay, *others])
            if shared > longest:
                best, longest = slot, shared
    return empty if not longest and mates and empty >= 0 else best
