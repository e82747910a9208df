"""Configuration of the policy loss: which one, what its ratios are of, and how it is averaged."""

import math
from dataclasses import dataclass

from forge_jax.loading import check

KINDS = ("cispo", "clip", "gspo", "decoupled", "tis", "reinforce")
CAPPED = ("cispo", "decoupled", "tis")  # those that look at ratio_cap
RECOMPUTED = ("decoupled", "tis")  # those that need the trainer's log-probs beside the sampler's
ANCHORS = ("sampler", "trainer")
REFERENCES = ("start",)
PER = ("token", "sample", "episode", "group", "constant")
RATIO_CAP = 5.0  # the default of ratio_cap
EPS = {"clip": (0.2, 0.28), "gspo": (3e-4, 4e-4), "decoupled": (0.2, 0.2)}  # low, high


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The policy loss of a run; its cap of ratios, `ratio_cap`, stands beside it."""

    kind: str = "cispo"  # one of KINDS
    # What the ratio of a kind is to: the log-probs of the sampler, or the trainer's own under the
    # weights before the first update of a batch. null: the trainer's where the kind needs both,
    # else the sampler's.
    anchor: str | None = None
    eps_low: float | None = None  # how far below 1 a ratio counts; null: the kind's own, see EPS
    eps_high: float | None = None  # ... above 1
    mask: bool = False  # cispo: drop tokens beyond eps_low and eps_high, as the clip does
    entropy: float = 0.0  # coefficient of the entropy that is added to the objective
    kl: float = 0.0  # coefficient of a divergence that is taken off
    # What it is from: null: the anchor; start: the weights before the first update of the run.
    reference: str | None = None
    per: str = "token"  # what the loss is a mean over, each a mean over its trained tokens
    constant: float | None = None  # per=constant: trained tokens that an episode is taken to have

    def __post_init__(self) -> None:
        for name, known in (("kind", KINDS), ("per", PER)):
            value = getattr(self, name)
            check(value in known, f"{name}={value!r} must be one of {', '.join(known)}")
        self._check_reference()
        self._check_anchor()
        self._check_eps()
        for name in ("entropy", "kl"):
            weight = getattr(self, name)
            check(0 <= weight < math.inf, f"{name}={weight} must be a number >= 0")
        check(
            self.per == "constant" or self.constant is None,
            f"constant={self.constant} goes with per=constant, not with per={self.per}",
        )
        check(
            self.per != "constant" or self.constant is not None,
            f"per={self.per} needs constant, the trained tokens that an episode is taken to have",
        )
        fine = self.constant is None or 0 < self.constant < math.inf
        check(fine, f"constant={self.constant} must be a number > 0")

    def _check_reference(self) -> None:
        if self.reference is None:
            return
        known = self.reference in REFERENCES
        check(known, f"reference={self.reference!r} must be one of {', '.join(REFERENCES)}")
        check(
            self.kl > 0,
            f"reference={self.reference}: kl={self.kl} does not keep the policy near it",
        )

    def _check_anchor(self) -> None:
        if self.anchor is None:
            return
        check(self.anchor in ANCHORS, f"anchor={self.anchor!r} must be one of {ANCHORS}")
        check(
            self.kind not in RECOMPUTED or self.anchor == "trainer",
            f"anchor={self.anchor}: kind={self.kind} corrects by the sampler already, "
            "its anchor is the trainer",
        )
        check(
            self.kind != "reinforce" or (self.kl > 0 and self.reference is None),
            f"anchor={self.anchor}: kind={self.kind} has no ratio, and kl={self.kl} is not from "
            f"the anchor, with reference={self.reference}",
        )

    def _check_eps(self) -> None:
        clips = self.kind in EPS or self.mask
        check(
            not self.mask or self.kind == "cispo",
            f"mask={self.mask} goes with kind=cispo, not with kind={self.kind}",
        )
        for name in ("eps_low", "eps_high"):
            value = getattr(self, name)
            check(
                value is None or clips,
                f"{name}={value} is not looked at where kind={self.kind} and mask={self.mask}",
            )
            check(value is None or value > 0, f"{name}={value} must be > 0")
            check(
                not self.mask or value is not None,
                f"{name}={value}: mask={self.mask} needs eps_low and eps_high",
            )
        low = self.eps_low
        check(low is None or low <= 1, f"eps_low={low} must be at most 1")

    @property
    def recomputed(self) -> bool:
        """True where the anchor is the trainer's policy before the batch's first update."""
        return (self.anchor or ("trainer" if self.kind in RECOMPUTED else "sampler")) == "trainer"

    @property
    def bounds(self) -> tuple[float, float]:
        """The ratios between which nothing is clipped."""
        low, high = EPS.get(self.kind, (1.0, float("inf")))
        low = low if self.eps_low is None else self.eps_low
        return 1 - low, 1 + (high if self.eps_high is None else self.eps_high)


def check_cap(loss: LossConfig, ratio_cap: float) -> None:
    """Raises ValueError for a cap that is none, or that the loss does not look at."""
    check(ratio_cap > 0, f"ratio_cap={ratio_cap} must be > 0")
    check(
        loss.kind in CAPPED or ratio_cap == RATIO_CAP,
        f"ratio_cap={ratio_cap} is not looked at by loss.kind={loss.kind}",
    )


def check_kl(loss: LossConfig, updates: int) -> None:
    """Raises ValueError where the divergence is from the very weights of the only update of a
    batch, and so is 0, with a gradient of 0."""
    check(
        not (loss.kl and loss.reference is None and loss.recomputed and updates == 1),
        f"loss.kl={loss.kl} is of the trainer before the batch, and sched.updates and sched.epochs "
        "of 1 leave nothing between: raise one, or set loss.anchor=sampler or loss.reference=start",
    )
