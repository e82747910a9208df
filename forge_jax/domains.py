"""Configurations of what a run trains on: one task family, or several domains in every step.

Keys of a configuration flow in, frozen records out. The invariant: a key that would have no effect
beside the others is refused by name.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forge_jax.crediting import RewardConfig
from forge_jax.loading import UserError, check

NAME = re.compile(r"[a-z][a-z0-9_]*")
# What other keys of metrics and summaries end in, where those of a domain end in its name.
TAKEN = (
    "after", "before", "bound", "broken", "ci", "collect", "constant", "dropped", "expired",
    "fault_calls", "fault_certain", "fault_language", "fault_repetition", "fault_unfinished",
    "faults", "first", "forgotten", "format", "last", "max", "mean", "outcome", "process",
    "requeued", "sampled", "speed", "total", "trained", "unique", "update",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """Which difficulties of a family are played."""

    levels: tuple[int, ...]  # from easy to hard
    promote: float | None = None  # success from which the next level is played; null: all in turn
    demote: float | None = None  # success down to which the level before is; null: never
    memory: int = 64  # tasks of a level that its success is the mean of

    def __post_init__(self) -> None:
        check(bool(self.levels), "levels=[] must name at least one")
        check(all(level >= 0 for level in self.levels), f"levels={self.levels} must be >= 0")
        check(len(set(self.levels)) == len(self.levels), f"levels={self.levels}: each once")
        check(self.memory >= 1, f"memory={self.memory} must be at least 1")
        for name in ("promote", "demote"):
            value = getattr(self, name)
            check(value is None or 0 <= value <= 1, f"{name}={value} must be from 0 to 1")
        low, high = self.demote, self.promote
        check(low is None or high is not None, f"demote={low} needs promote")
        check(
            low is None or high is None or low < high, f"demote={low} must be below promote={high}"
        )
        check(
            high is None or len(self.levels) > 1,
            f"promote={high} leads nowhere with levels={self.levels}",
        )


@dataclass(frozen=True, kw_only=True)
class DomainConfig:
    """One domain of several; sizes that are null are its share of those in `sched`."""

    family: str | None = None  # task family; null: the name of the domain
    share: float = 1.0  # of what an update consumes, relative to those of the others
    tasks: int | None = None  # different tasks, which then come again; null: 2^20
    curriculum: CurriculumConfig | None = None  # null: level 0
    in_flight: int | None = None  # N of its own
    window: int | None = None  # W of its own
    head_seconds: float | None = None  # of its own; null: as `sched` has it
    requeue: bool | None = None  # of its own; null: as `sched` has it

    def __post_init__(self) -> None:
        check(0 < self.share < math.inf, f"share={self.share} must be a number > 0")
        check(self.tasks is None or self.tasks >= 1, f"tasks={self.tasks} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """Updates in which the domains have shares of their own."""

    shares: Mapping[str, float]  # of domains by name, relative to each other; others have none
    until: int | None = None  # the last of them; null: there is no other stage

    def __post_init__(self) -> None:
        check(bool(self.shares), "shares={} must name at least one domain")
        for name, share in self.shares.items():
            fine = type(share) in (int, float) and 0 < share < math.inf
            check(fine, f"shares.{name}={share!r} must be a number > 0")
        check(self.until is None or self.until >= 1, f"until={self.until} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """What is consumed or drawn, and then left aside for another of its domain."""

    constant: bool = False  # groups that say nothing: equal rewards, or too few valid episodes
    tries: int | None = None  # of them, in an update and domain, that another one makes good
    solved: float | None = None  # a task is not played again whose past pass rate is so high

    def __post_init__(self) -> None:
        check(
            self.constant == (self.tries is not None),
            f"constant={self.constant} and tries={self.tries} go together",
        )
        check(self.tries is None or self.tries >= 1, f"tries={self.tries} must be at least 1")
        solved = self.solved
        check(solved is None or 0 < solved <= 1, f"solved={solved} must be above 0, at most 1")


@dataclass(frozen=True, kw_only=True)
class Domain:
    """A domain as a run has it: named, with its part of the whole."""

    name: str
    family: str
    share: float  # of the whole: those of all domains add up to 1
    own: DomainConfig


def mixture(task: str | None, domains: Mapping[str, DomainConfig] | None) -> tuple[Domain, ...]:
    """The domains of a run, in their order; that of `task` is alone."""
    if domains is None:
        assert task is not None
        return (Domain(name=task, family=task, share=1.0, own=DomainConfig()),)
    whole = sum(own.share for own in domains.values())
    return tuple(
        Domain(name=name, family=own.family or name, share=own.share / whole, own=own)
        for name, own in domains.items()
    )


def check_domains(
    task: str | None, domains: Mapping[str, DomainConfig] | None, shared: bool
) -> None:
    """Raises UserError unless there is either a task or a mapping of well-named domains; where they
    have a `shared` queue, families of their own and no sizes of their own."""
    if (task is None) == (domains is None):
        said = None if domains is None else list(domains)
        raise UserError(f"task={task} and domains={said}: give one of them")
    if domains is None:
        return
    check(bool(domains), "domains={} must name at least one")
    for name in domains:
        fine = NAME.fullmatch(name) and name not in TAKEN
        check(
            bool(fine), f"domains.{name}: a name has letters, digits and _, and is none of {TAKEN}"
        )
    if shared:
        _check_shared(domains)


def _check_shared(domains: Mapping[str, DomainConfig]) -> None:
    """Raises UserError where domains could not be told apart in one queue, or want their own."""
    families = [own.family or name for name, own in domains.items()]
    check(
        len(set(families)) == len(families),
        f"shares=admitted goes with a family for each domain, not {families}",
    )
    for name, own in domains.items():
        for key in ("in_flight", "window", "head_seconds", "requeue"):
            value = getattr(own, key)
            check(
                value is None,
                f"domains.{name}.{key}={value} goes with a queue of its own, not shares=admitted",
            )


def check_stages(
    stages: tuple[StageConfig, ...] | None, domains: Mapping[str, DomainConfig] | None
) -> None:
    """Raises ValueError unless stages follow each other, the last one without an end, and have
    each domain at least once."""
    if stages is None:
        return
    shares = [dict(stage.shares) for stage in stages]
    check(domains is not None, f"stages of the shares {shares} go with domains: there are none")
    ends = [stage.until for stage in stages]
    inner = [end for end in ends[:-1] if end is not None]
    rising = len(set(inner)) == len(ends) - 1 and inner == sorted(inner)
    check(
        bool(ends) and ends[-1] is None and rising,
        f"stages: until={ends} must grow, and be null of the last stage alone",
    )
    named = {name for stage in stages for name in stage.shares}
    check(
        named == set(domains or {}),
        f"stages: shares of {sorted(named)} must be those of the domains {sorted(domains or {})}",
    )


def check_filter(filters: FilterConfig, domains: Mapping[str, DomainConfig] | None) -> None:
    """Raises ValueError where a filter has nothing to leave aside."""
    again = any(own.tasks is not None for own in (domains or {}).values())
    check(
        filters.solved is None or again,
        f"filter.solved={filters.solved} needs tasks=N of a domain: no other tasks come again",
    )


def check_rewards(reward: RewardConfig, domains: Sequence[Domain]) -> None:
    """Raises ValueError where a family has rewards of its own and no tasks."""
    known = [domain.family for domain in domains]
    for own in reward.families:
        check(own.family in known, f"reward.families: {own.family} is none of the run's: {known}")
