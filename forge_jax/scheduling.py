"""What a run's generation queue holds, in which order it is consumed, and who changes that.

Keys of a configuration flow in, frozen records out. The invariant: a key that would have no effect
beside the others is refused by name.
"""

import math
from dataclasses import dataclass

from forge_jax.loading import check

POLICIES = ("window", "fifo", "greedy", "greedy_drop", "versions", "stream")
NEEDS = {"greedy_drop": "drop_updates", "versions": "versions", "stream": "buffer"}
SHARES = ("items", "tokens", "admitted")
Window = int | float | str | None


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """When the window is tuned while a run goes on, and what it must keep."""

    lag_updates: int  # the largest lag allowed, by the bound
    every: int = 50  # updates
    skew: float = 0.2  # the largest of seconds in service that may be predicted
    most: int | None = None  # places that agents and engine can hold; null: what the lag allows
    memory: int = 2000  # items that ended last, from which predictions are made
    least: int = 100  # items to have measured before the first time
    horizon: int = 150  # updates of each prediction

    def __post_init__(self) -> None:
        for name, low in (("lag_updates", 1), ("every", 1), ("least", 2), ("horizon", 10)):
            value = getattr(self, name)
            check(value >= low, f"{name}={value} must be at least {low}")
        check(0 < self.skew < math.inf, f"skew={self.skew} must be a number > 0")
        check(self.most is None or self.most >= 1, f"most={self.most} must be at least 1")
        check(self.memory >= self.least, f"memory={self.memory} < least={self.least}")


@dataclass(frozen=True, kw_only=True)
class SchedConfig:
    """What the generation queue holds and in which order it is consumed."""

    group: int = 8  # G: episodes of one task
    batch: int = 8  # P: groups consumed a step
    updates: int = 1  # minibatches of whole groups that a batch is cut into, an update each
    epochs: int = 1  # passes over them
    shares: str = "items"  # what shares of domains are of: trained items, their sampled tokens,
    # or what is admitted to one queue that all domains share
    in_flight: int | None = None  # N: groups in flight or finished but unconsumed; see `places`
    policy: str = "window"  # which finished group is next, and which is given up
    window: Window = "auto"  # W: how far past the head may be consumed: a number, a share of N,
    # auto (what lag_updates allows, else 0.3 N); null is greedy
    lag_updates: int | None = None  # updates of lag that W is narrowed to keep, by its bound
    drop_updates: int | None = None  # greedy_drop: what is older is given up
    versions: int | None = None  # versions: updates that an admission may be behind the head's
    buffer: int | None = None  # stream: finished groups that wait, the oldest past it given up
    head_seconds: float | None = None  # that an unfinished head may be waited for; null: for ever
    requeue: bool = False  # True: the first time it goes to the end of the queue, as a new group
    group_seconds: float | None = None  # after which a group does without its slowest; null: never
    group_least: int | None = None  # episodes that must have completed then, or it is given up
    tune: TuningConfig | None = None  # who changes N and W while the run goes on; null: nobody
    synchronous: bool = False  # True: a step's groups are all sampled by the newest weights
    hold_updates: int = 0  # ... or by those that many updates older, where synchronous
    episode_seconds: float = 60.0  # an episode that takes longer has timed out
    tool_seconds: float | None = None  # of a tool in it; None: no limit of its own
    verify_seconds: float | None = 30.0  # of scoring its answer; None: no limit of its own
    pool_seconds: float = 600.0  # that the pool's store may be away before the run ends

    def __post_init__(self) -> None:
        check(self.group >= 2, f"group={self.group} must be at least 2 (the baseline is siblings)")
        check(self.batch >= 1, f"batch={self.batch} must be at least 1")
        check(
            1 <= self.updates <= self.batch,
            f"updates={self.updates} must be from 1 to batch={self.batch}: each has whole groups",
        )
        check(self.epochs >= 1, f"epochs={self.epochs} must be at least 1")
        check(self.places >= self.batch, f"in_flight={self.in_flight} < batch={self.batch}")
        check(self.shares in SHARES, f"shares={self.shares!r} must be one of {', '.join(SHARES)}")
        self._check_policy()
        self._check_lag()
        head = self.head_seconds
        check(head is None or 0 < head < math.inf, f"head_seconds={head} must be a number > 0")
        check(
            not self.requeue or head is not None or self.group_seconds is not None,
            f"requeue={self.requeue} needs head_seconds or group_seconds: without either no group "
            "is requeued",
        )
        self._check_group()
        self._check_synchronous()
        check(self.episode_seconds > 0, f"episode_seconds={self.episode_seconds} must be > 0")
        for name in ("tool_seconds", "verify_seconds"):
            limit = getattr(self, name)
            check(limit is None or 0 < limit < math.inf, f"{name}={limit} must be a number > 0")
        check(self.pool_seconds >= 0, f"pool_seconds={self.pool_seconds} must be >= 0")

    def _check_policy(self) -> None:
        policy, window = self.policy, self.window
        check(policy in POLICIES, f"policy={policy!r} must be one of {', '.join(POLICIES)}")
        number = type(window) is int and window >= 0
        share = type(window) is float and 0 <= window <= 1
        check(
            number or share or window is None or window == "auto",
            f"window={window!r} must be an integer >= 0, a share of in_flight from 0.0 to 1.0, "
            "auto or null",
        )
        check(
            policy == "window" or window == "auto",
            f"window={window!r} goes with policy=window: policy={policy} has its own; set auto",
        )
        for owner, name in NEEDS.items():
            value = getattr(self, name)
            least = 1 if name == "buffer" else 0
            check(
                value is None or policy == owner,
                f"{name}={value} goes with policy={owner}: policy={policy} does not use it",
            )
            check(policy != owner or value is not None, f"policy={policy} needs {name}")
            check(value is None or value >= least, f"{name}={value} must be >= {least}")

    def _check_lag(self) -> None:
        check(
            self.lag_updates is None or self.tune is None,
            f"lag_updates={self.lag_updates} goes without tune, whose own lag_updates rules",
        )
        name, lag = "lag_updates" if self.tune is None else "tune.lag_updates", self.lag_budget
        if lag is None:
            return
        check(
            self.policy == "window",
            f"{name}={lag} goes with policy=window: policy={self.policy} has no window to set",
        )
        check(lag >= 1, f"{name}={lag} must be at least 1")
        check(
            self.places <= lag * self.batch,
            f"{name}={lag} is too few for in_flight={self.places} and batch={self.batch}: "
            "no window, not even 0, keeps it",
        )
        check(
            self.shares != "tokens",
            f"{name}={lag} goes without shares={self.shares}, where an update may lack a domain",
        )

    def _check_group(self) -> None:
        seconds, least = self.group_seconds, self.group_least
        check(
            (seconds is None) == (least is None),
            f"group_seconds={seconds} and group_least={least} go together",
        )
        if seconds is None or least is None:
            return
        check(
            0 < seconds < self.episode_seconds,
            f"group_seconds={seconds} must be a number > 0, and less than "
            f"episode_seconds={self.episode_seconds}, when every episode has ended",
        )
        check(
            2 <= least < self.group,
            f"group_least={least} must be at least 2 (the baseline is siblings) and less than "
            f"group={self.group}",
        )

    def _check_synchronous(self) -> None:
        check(self.hold_updates >= 0, f"hold_updates={self.hold_updates} must be >= 0")
        check(
            self.synchronous or not self.hold_updates,
            f"hold_updates={self.hold_updates} goes with synchronous=True: else what is sampled "
            "meanwhile is older already",
        )
        if not self.synchronous:
            return
        check(
            self.places == self.batch,
            f"in_flight={self.in_flight} must be batch={self.batch} where synchronous=True: "
            "what is left over would be of older weights",
        )
        check(
            self.policy not in NEEDS,
            f"policy={self.policy} goes with synchronous=False: nothing grows old in one step",
        )
        check(self.tune is None, "tune goes with synchronous=False, where N is not the batch")

    @property
    def places(self) -> int:
        """N; where `in_flight` is null one batch if synchronous, else two."""
        if self.in_flight is not None:
            return self.in_flight
        return self.batch if self.synchronous else 2 * self.batch

    @property
    def lag_budget(self) -> int | None:
        """The updates of lag that the window keeps by its bound; None: it is not asked to."""
        return self.lag_updates if self.tune is None else self.tune.lag_updates
