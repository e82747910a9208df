"""When a step of training is not taken, though there is something to train on, and when a run
that comes to nothing is ended."""

import enum
from dataclasses import dataclass

from forge_jax.loading import check


class Skip(enum.StrEnum):
    """Why a step was not taken."""

    NON_FINITE = "non_finite"  # its loss, a log-prob or a gradient is
    ESS = "ess"  # the effective sample size of its ratios is too small
    KL = "kl"  # the policy is too far from what sampled
    GRAD_NORM = "grad_norm"  # it is far above that of the steps before


@dataclass(frozen=True, kw_only=True)
class ProtectConfig:
    """Limits of a step, beyond which it is skipped; null: none. What is not finite always is."""

    least_ess: float | None = None  # effective sample size of the tokens' ratios, a share of them
    most_kl: float | None = None  # of the sampler from the policy, nats a token
    norm_spike: float | None = None  # times the median of the gradient's norm in steps before
    cosine: float | None = None  # of one step's gradient and the next's: warns above it
    most_skipped: int = 10  # batches in a row of which nothing was taken, at which the run ends
    most_broken: int = 10  # items in a row that errors of our own broke, at which the run ends

    def __post_init__(self) -> None:
        ess, kl, spike, cosine = self.least_ess, self.most_kl, self.norm_spike, self.cosine
        check(ess is None or 0 < ess < 1, f"least_ess={ess} must be between 0 and 1")
        check(kl is None or kl > 0, f"most_kl={kl} must be > 0")
        check(spike is None or spike > 1, f"norm_spike={spike} must be > 1")
        check(cosine is None or -1 < cosine < 1, f"cosine={cosine} must be between -1 and 1")
        check(self.most_skipped >= 1, f"most_skipped={self.most_skipped} must be at least 1")
        check(self.most_broken >= 1, f"most_broken={self.most_broken} must be at least 1")
