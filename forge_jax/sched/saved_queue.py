"""What a saved state of the generation queue must look like.

Plain JSON flows in, a UserError flows out or nothing does. The invariant: a state that passes is
one that a queue of this policy can be in.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from forge_jax.config import UserError
from forge_jax.sched.policies import Policy, Why, as_plain

KEYS = (
    "admitted", "again", "ahead", "change", "consumed", "edges", "evicted", "finished", "head",
    "policy", "running", "version",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Change:
    """Of one window, or several, to another, while items of all of them are in the queue."""

    window: int  # the narrowest W
    places: int  # the largest N
    items: int  # the largest bound of the lag, in items
    until: int  # the last number that was admitted under another window


def check_state(state: Mapping[str, Any], policy: Policy) -> None:
    """Raises UserError unless `state` is one that a `Queue` of `policy` can give."""

    def need(condition: bool, message: str) -> None:
        if not condition:
            raise UserError(f"saved queue: {message}")

    need(sorted(state) == list(KEYS), f"keys are {sorted(state)}, not {list(KEYS)}")
    own, saved = as_plain(policy), state["policy"]
    need(isinstance(saved, dict), f"policy={saved!r} must be an object")
    for name in own | saved:
        differ = f"{name}={saved.get(name)!r}, but this queue has {name}={own.get(name)!r}"
        need(name in own and name in saved and own[name] == saved[name], differ)
    for name in ("admitted", "consumed", "head", "version"):
        fine = type(state[name]) is int and state[name] >= 0
        need(fine, f"{name}={state[name]!r} must be an integer >= 0")
    for name in ("again", "ahead", "edges", "finished", "running"):
        need(type(state[name]) is list, f"{name}={state[name]!r} must be a list")
    for name, size in (("running", 3), ("finished", 3), ("edges", 2)):
        for row in state[name]:
            integers = isinstance(row, list) and [type(x) for x in row] == [int] * size
            need(integers, f"{name}: {row!r} must be {size} integers")
    counts = state["evicted"]
    fine = isinstance(counts, dict) and sorted(counts) == sorted(why.value for why in Why)
    need(fine, f"evicted={counts!r} must have a count of each reason")
    _check_numbers(state, need)


def _check_numbers(state: Mapping[str, Any], need: Any) -> None:
    head, ahead, admitted = state["head"], state["ahead"], state["admitted"]
    places = state["running"] + state["finished"]
    need(all(type(n) is int and n > head for n in ahead), f"{ahead=} must be past {head=}")
    numbers = sorted(ahead + [row[0] for row in places])
    whole = numbers == list(range(head, admitted))
    need(whole, f"the items are {numbers}, not all of [{head}, {admitted})")
    gone, consumed = sum(state["evicted"].values()), state["consumed"]
    ended = head + len(ahead)
    need(consumed + gone == ended, f"{consumed=} and {gone} given up are not {ended}")
    window, most = (state["policy"].get(name) for name in ("window", "in_flight"))
    if (change := state["change"]) is not None:
        whole = isinstance(change, dict) and sorted(change) == sorted(
            f.name for f in fields(Change)
        )
        need(whole and all(type(x) is int for x in change.values()), f"{change=} must be integers")
        need(head <= change["until"] < admitted, f"{change=} must end in [{head}, {admitted})")
        window, most = None, change["places"]  # what an earlier window had let in may be far ahead
    reach = math.inf if window is None else head + window
    need(all(n <= reach for n in ahead), f"{ahead=} is not within the window of {head=}")
    need(most is None or len(places) <= most, f"{len(places)} items are in flight")
    for number, before, version in places:
        fine = 0 <= before <= consumed and 0 <= version <= state["version"]
        need(fine, f"item {number} was admitted at count {before}, version {version}")
