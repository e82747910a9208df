"""What a restored run takes over: of saved queues, and of a pool that may hold more or less.

Plain JSON of the queues of all lanes and item numbers flow in, what runs again flows out. Item k of
lane l among L lanes has the number k L + l.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from forge_jax.types import Episode


def admitted_later(number: int, queues: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an item was admitted after the states of `queues` were taken."""
    place, lane = divmod(number, len(queues))
    return bool(place >= queues[lane]["admitted"])


def without_lost(
    lane: int, queues: Sequence[Mapping[str, Any]], usable: AbstractSet[int]
) -> dict[str, Any]:
    """The state of a lane's queue, in which what is finished and not `usable` runs again."""
    queue, lanes = queues[lane], len(queues)
    kept = [entry for entry in queue["finished"] if entry[0] * lanes + lane in usable]
    lost = [entry for entry in queue["finished"] if entry not in kept]
    return {**queue, "finished": kept, "running": sorted(queue["running"] + lost)}


def newest(episodes: Sequence[Episode]) -> int:
    """The newest weight version that sampled any token of a group; 0 if none did."""
    versions = [int(t.versions.max()) for e in episodes for t in e.turns if len(t.versions)]
    return max(versions, default=0)
