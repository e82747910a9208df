"""Which row of a call a slot has: rows of one place of the mesh, then those of the next.

Slots flow in, rows flow out. Invariant: a place has as many rows as any other, and its
first slots in a decode call.
"""

from collections.abc import Iterable, Sequence

from forge_jax.config import RolloutConfig


def rows_of_spans(slots: Sequence[int], tokens: int, rollout: RolloutConfig) -> Sequence[int]:
    """The rows that spans of `slots` have in a prefill call with `tokens` a row: of those of their
    place, in order."""
    if rollout.dealt == 1:
        return range(len(slots))
    each = rollout.chunk // tokens
    free = [iter(range(place * each, (place + 1) * each)) for place in range(rollout.dealt)]
    return [next(free[slot // rollout.place_slots]) for slot in slots]


def row_of(slot: int, rows: int, rollout: RolloutConfig) -> int:
    """The row of a slot in a decode call of `rows`."""
    if rows == rollout.slots or rollout.dealt == 1:
        return slot
    place, seat = divmod(slot, rollout.place_slots)
    return place * (rows // rollout.dealt) + seat


def rows_for(slots: Iterable[int], rollout: RolloutConfig) -> int:
    """Rows of the smallest decode call that has all of `slots`."""
    each = rollout.place_slots
    last = max(slot % each for slot in slots)
    return fit((last + 1) * rollout.dealt, row_buckets(rollout))


def row_buckets(rollout: RolloutConfig) -> tuple[int, ...]:
    """Rows of a decode call: whole bundles of every place, a ratio of 4 apart."""
    sizes = [rollout.place_slots]
    while not rollout.deterministic and sizes[-1] > 8 and sizes[-1] % (4 * rollout.bundle) == 0:
        sizes.append(sizes[-1] // 4)
    return tuple(size * rollout.dealt for size in reversed(sizes))


def fit(size: int, sizes: Sequence[int]) -> int:
    """The smallest of `sizes` that holds `size`."""
    return next(each for each in sorted(sizes) if each >= size)
