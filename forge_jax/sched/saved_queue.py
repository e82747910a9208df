"""What a saved state of the generation queue must look like.

Plain JSON flows in, a UserError flows out or nothing does. The invariant: a state that passes is
one that a queue of this policy can be in.
"""

import math
from collections.abc import Mapping
from typing import Any

from forge_jax.config import UserError
from forge_jax.sched.policies import Policy, Why, as_plain

KEYS = (
    "admitted", "again", "ahead", "consumed", "edges", "evicted", "finished", "head", "policy",
    "running", "version",
)  # fmt: skip


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
    window = state["policy"].get("window")
    reach = math.inf if window is None else head + window
    need(all(n <= reach for n in ahead), f"{ahead=} is not within the window of {head=}")
    most = state["policy"].get("in_flight", math.inf)
    need(len(places) <= most, f"{len(places)} items are in flight")
    for number, before, version in places:
        fine = 0 <= before <= consumed and 0 <= version <= state["version"]
        need(fine, f"item {number} was admitted at count {before}, version {version}")
