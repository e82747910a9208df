"""The policies that the cost function is measured against.

They pick an instance by a rule; how the call is then served there, computing or fetching, is
`plan_at`'s decision for each of them, as it is for the cost function: what differs is the
choice of the instance alone.
"""

import zlib
from collections.abc import Mapping, Sequence

from forge_jax.rollout.router.cost import (
    Call,
    Plan,
    Policy,
    Source,
    View,
    Weights,
    by_cost,
    plan_at,
)


def round_robin(
    call: Call, views: Sequence[View], sources: Sequence[Source], weights: Weights
) -> Plan:
    """Each instance in its turn."""
    return plan_at(call, views[call.number % len(views)], sources)


def least_loaded(
    call: Call, views: Sequence[View], sources: Sequence[Source], weights: Weights
) -> Plan:
    """The instance with the fewest calls that have not ended; ties in turn."""
    return plan_at(call, _least(call, views), sources)


def sticky(call: Call, views: Sequence[View], sources: Sequence[Source], weights: Weights) -> Plan:
    """A session's calls at one instance, chosen by rendezvous hashing of its name.

    Only the sessions of an instance that goes away are moved.
    """
    chosen = max(views, key=lambda v: zlib.crc32(f"{call.session}/{v.name}".encode()))
    return plan_at(call, chosen, sources)


def thresholds(
    call: Call, views: Sequence[View], sources: Sequence[Source], weights: Weights
) -> Plan:
    """SGLang's cache-aware rule: balance if loads are far apart, else go where the prefix is.

    Far apart is max - min > `apart` and max > `ratio` * min; a prefix is worth it when more
    than `matched` of the prompt is there. Where none is, the comment beside the rule speaks of
    the smallest tree, while its code takes the least loaded instance: this is the code.
    """
    loads = [view.load for view in views]
    apart = max(loads) - min(loads) > weights.apart and max(loads) > weights.ratio * min(loads)
    best = max(views, key=lambda view: view.prefix)
    if not apart and best.prefix > weights.matched * call.tokens:
        return plan_at(call, best, sources)
    return plan_at(call, _least(call, views), sources)


POLICIES: Mapping[str, Policy] = {
    "cost": by_cost,
    "round_robin": round_robin,
    "least_loaded": least_loaded,
    "sticky": sticky,
    "thresholds": thresholds,
}


def _least(call: Call, views: Sequence[View]) -> View:
    first = call.number % len(views)
    return min((*views[first:], *views[:first]), key=lambda view: view.load)
