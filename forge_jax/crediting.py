"""Configurations of what an episode is worth, and of how its calls are credited with it.

Invariant: a setting that would change nothing beside the others is refused.
"""

import dataclasses
import math
import sys
import unicodedata
from dataclasses import dataclass, field

from forge_jax.loading import check

BASELINES = ("leave_one_out", "group", "turn", "none")
SCALES = ("none", "group", "batch", "family")
CLOCKS = ("calls", "seconds")
SPEED_ON = ("solved", "all")


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """What each fault of a call costs where it is complete; see `forge_jax.rl.process`."""

    calls: float = 1.0  # share of its tool calls that are malformed
    unfinished: float = 1.0  # the reply was cut off at its limit
    repetition: float = 1.0  # share of n-grams that were there before
    certain: float = 1.0  # a run of near-certain tokens
    language: float = 1.0  # share of letters of other scripts than `scripts`
    ngram: int = 8  # tokens
    certain_tokens: int = 3000  # of such a run
    certain_p: float = 0.99  # probability above which a token is near-certain
    scripts: tuple[str, ...] = ()  # as Unicode names letters (LATIN, CJK); empty: not measured

    def __post_init__(self) -> None:
        for name in ("calls", "unfinished", "repetition", "certain", "language"):
            cost = getattr(self, name)
            check(0 <= cost < math.inf, f"{name}={cost} must be a number >= 0")
        check(self.ngram >= 1, f"ngram={self.ngram} must be at least 1")
        check(self.certain_tokens >= 1, f"certain_tokens={self.certain_tokens} must be at least 1")
        check(0 < self.certain_p < 1, f"certain_p={self.certain_p} must be between 0 and 1")
        check_scripts(self.scripts)


def check_scripts(scripts: tuple[str, ...]) -> None:
    """Raises ValueError for a name that no script has."""
    for script in scripts:
        said = f"scripts: {script!r} must be a script in capitals, as LATIN"
        check(script.isascii() and script.isupper(), said)
        check(has_letters(script), f"scripts: {script!r} begins the Unicode name of no letter")


def has_letters(script: str) -> bool:
    """Whether `script` begins the Unicode name of any letter."""
    characters = map(chr, range(sys.maxunicode + 1))
    names = (unicodedata.name(one, "") for one in characters if one.isalpha())
    return any(name.startswith(f"{script} ") for name in names)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Of the components of a reward."""

    process: float  # α, of what a call does wrong
    speed: float  # β, of time against siblings
    outcome: float  # of the task's own reward
    speed_on: str = "solved"  # episodes that are paid for speed, beside one another: solved | all

    def __post_init__(self) -> None:
        for name in ("process", "speed", "outcome"):
            weight = getattr(self, name)
            check(0 <= weight < math.inf, f"{name}={weight} must be a number >= 0")
        on = self.speed_on
        check(on in SPEED_ON, f"speed_on={on!r} must be one of {SPEED_ON}")
        any_counts = self.process or self.speed or self.outcome
        check(bool(any_counts), "process, speed and outcome are all 0: nothing is rewarded")


@dataclass(frozen=True, kw_only=True)
class FamilyReward:
    """What one task family has of its own; null: as all others."""

    family: str
    process: float | None = None
    speed: float | None = None
    outcome: float | None = None
    speed_on: str | None = None
    scripts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        own = [f.name for f in dataclasses.fields(self) if f.name != "family"]
        says = any(getattr(self, name) is not None for name in own)
        check(says, f"family={self.family!r} has nothing of its own: {', '.join(own)}")
        check_scripts(self.scripts or ())


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """``r_t = process * process_t + speed * speed_t + outcome * outcome_t`` of every call t."""

    # As in `Weights`, of every family that has none of its own.
    process: float = 0.0
    speed: float = 0.0
    outcome: float = 1.0
    speed_on: str = "solved"
    faults: FaultConfig = field(default_factory=FaultConfig)
    families: tuple[FamilyReward, ...] = ()

    def __post_init__(self) -> None:
        names = [one.family for one in self.families]
        twice = sorted({name for name in names if names.count(name) > 1})
        check(not twice, f"families: {', '.join(twice)} more than once")
        for name in [*names, ""]:
            process = self.weights(name).process  # where what is no weight is refused
            named = f" of {name}" if name else ""
            check(not process or self._costs(name), f"process={process}{named}: all faults cost 0")
        self._check_speed_on()

    def _check_speed_on(self) -> None:
        names = ["", *(one.family for one in self.families)]
        somewhere = any(self.weights(name).speed for name in names)
        said = "goes with a speed weight above 0"
        check(self.speed_on != "all" or somewhere, f"speed_on={self.speed_on!r} {said}")
        for one in self.families:
            paid = one.speed_on != "all" or self.weights(one.family).speed > 0
            check(paid, f"speed_on={one.speed_on!r} of {one.family} {said}")

    def weights(self, family: str) -> Weights:
        """Those of the tasks of a family."""
        own = self._own(family)
        named = {f.name: getattr(own, f.name) for f in dataclasses.fields(Weights)} if own else {}
        common = {f.name: getattr(self, f.name) for f in dataclasses.fields(Weights)}
        return Weights(**common | {k: v for k, v in named.items() if v is not None})

    def scripts(self, family: str) -> tuple[str, ...]:
        """Scripts that the tasks of a family are to be answered in; empty: any."""
        own = self._own(family)
        return self.faults.scripts if own is None or own.scripts is None else own.scripts

    def _costs(self, family: str) -> bool:
        """Whether any fault that is measured of the tasks of a family, of "" of any, costs."""
        names = [family] if family else ["", *(one.family for one in self.families)]
        told = any(self.scripts(name) for name in names)
        of = self.faults
        others = of.calls or of.unfinished or of.repetition or of.certain
        return bool(others or (told and of.language))

    def measures(self, family: str) -> bool:
        """Whether the faults of a family's calls are told: where they weigh anything, and where
        anything is said of them. It takes time on long calls."""
        told = self.faults != FaultConfig() or bool(self.scripts(family))
        return told or self.weights(family).process > 0

    def _own(self, family: str) -> FamilyReward | None:
        return next((one for one in self.families if one.family == family), None)


@dataclass(frozen=True, kw_only=True)
class CreditConfig:
    """How the calls of an episode share in its return; see `forge_jax.rl.advantages`."""

    gamma: float = 1.0  # discount of what comes later, for each unit of `clock`
    clock: str = "calls"  # calls | seconds, between the starts of calls
    to_go: bool = True  # False: every call is credited with the return of the whole episode
    baseline: str = "leave_one_out"  # leave_one_out | group | turn | none
    scale: str = "none"  # advantages over their standard deviation: none | group | batch | family
    step_weight: float = 0.0  # of the advantage among calls of the same state (GiGPO); 0: none

    def __post_init__(self) -> None:
        check(0 < self.gamma <= 1, f"gamma={self.gamma} must be above 0 and at most 1")
        check(self.clock in CLOCKS, f"clock={self.clock!r} must be one of {CLOCKS}")
        discounts = self.clock == "calls" or self.gamma < 1
        check(discounts, f"clock={self.clock!r} goes with a gamma below 1")
        check(self.baseline in BASELINES, f"baseline={self.baseline!r} must be one of {BASELINES}")
        check(
            self.to_go or self.baseline != "turn",
            f"baseline={self.baseline!r} is of returns to go: it needs to_go=True",
        )
        check(self.scale in SCALES, f"scale={self.scale!r} must be one of {SCALES}")
        weight = self.step_weight
        check(0 <= weight < math.inf, f"step_weight={weight} must be a number >= 0")
