"""What rules the generation queue of a domain, from its configuration.

Sizes flow in; a policy, deadlines and a tuner flow out. The invariant: where a lag budget
is set, no order of finishing exceeds it.
"""

import math

from forge_jax.config import SchedConfig
from forge_jax.rl.partial import GroupDeadline
from forge_jax.rl.tuning import Tuning
from forge_jax.sched.online import OnlineConfig, Tuner
from forge_jax.sched.policies import (
    GreedyDrop,
    Policy,
    Stream,
    VersionWindow,
    Window,
    budget_window,
    fifo,
    greedy,
    share_window,
)
from forge_jax.sched.queue import Deadline, Queue
from forge_jax.sched.tuner import TuneConfig

WINDOW_SHARE = 0.3  # of N: the published ratio


def new_policy(sched: SchedConfig) -> Policy:
    """What `sched.policy` says of admitting, taking and giving up."""
    places = sched.places
    match sched.policy:
        case "fifo":
            return fifo(places)
        case "greedy":
            return greedy(places)
        case "greedy_drop":
            assert sched.drop_updates is not None
            return GreedyDrop(in_flight=places, max_updates=sched.drop_updates)
        case "versions":
            assert sched.versions is not None
            return VersionWindow(in_flight=places, versions=sched.versions)
        case "stream":
            assert sched.buffer is not None
            return Stream(running=places, buffer=sched.buffer)
    return Window(in_flight=places, window=width(sched))


def width(sched: SchedConfig) -> int | None:
    """W of a window, narrowed to keep the lag budget; None is greedy."""
    window, widest = sched.window, None
    if sched.lag_budget is not None:
        widest = budget_window(sched.places, sched.batch, sched.lag_budget)
    if window == "auto":
        return share_window(sched.places, WINDOW_SHARE) if widest is None else widest
    if window is None:
        return widest
    assert not isinstance(window, str)
    wanted = share_window(sched.places, window) if isinstance(window, float) else window
    return wanted if widest is None else min(wanted, widest)


def new_deadline(sched: SchedConfig) -> Deadline | None:
    """How long an unfinished head may be waited for, and whether it is requeued; None: for ever."""
    if sched.head_seconds is None and not sched.requeue:
        return None
    seconds = math.inf if sched.head_seconds is None else sched.head_seconds
    return Deadline(seconds=seconds, requeue=sched.requeue)


def new_tuning(sched: SchedConfig, queue: Queue) -> Tuning | None:
    """What changes the window of `queue` while it runs; None: nothing does."""
    wanted = sched.tune
    if wanted is None:
        return None
    tune = TuneConfig(
        updates=wanted.lag_updates, skew=wanted.skew, most=wanted.most, horizon=wanted.horizon
    )
    cfg = OnlineConfig(tune=tune, every=wanted.every, memory=wanted.memory, least=wanted.least)
    return Tuning(queue, Tuner(cfg, batch=queue.batch, deadline=queue.deadline))


def group_deadline(sched: SchedConfig) -> GroupDeadline | None:
    """When a group does without its slowest episodes; None: never."""
    if sched.group_seconds is None or sched.group_least is None:
        return None
    return GroupDeadline(seconds=sched.group_seconds, least=sched.group_least)
