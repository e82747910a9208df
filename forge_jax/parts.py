"""Configurations of what is trained beside a model, in place of it, and of its experts; of the
processes that share a mesh; of what an agent may use."""

from dataclasses import dataclass

from forge_jax.loading import check

ADAPTABLE = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """Multi-token prediction modules, trained beside the policy on what it says itself."""

    depth: int = 0  # modules to give to a model that has none
    weight: float = 0.0  # λ of each module's loss; 0: modules are not trained
    frozen: bool = False  # modules are measured as if they were trained, and stay as they are
    top_k: int = 64  # likeliest words of the policy that are matched one by one
    decay: float = 0.0  # η: by exp(-η α) the loss turns from the divergence to 1 - α

    def __post_init__(self) -> None:
        check(self.depth >= 0, f"depth={self.depth} must be >= 0")
        check(self.weight >= 0, f"weight={self.weight} must be >= 0")
        check(self.top_k >= 1, f"top_k={self.top_k} must be at least 1")
        check(self.decay >= 0, f"decay={self.decay} must be >= 0")
        check(
            self.depth == 0 or self.weight > 0,
            f"depth={self.depth} adds modules that weight={self.weight} would not train",
        )
        check(
            not self.frozen or self.weight > 0,
            f"frozen={self.frozen} measures modules, which weight={self.weight} does not",
        )


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters, trained in place of the model, which stays as it is."""

    rank: int = 0  # 0: no adapters, the model is trained
    alpha: float = 16.0  # what adapters add counts alpha / rank
    targets: tuple[str, ...] = ADAPTABLE  # matrices of every layer that have one

    def __post_init__(self) -> None:
        check(self.rank >= 0, f"rank={self.rank} must be >= 0")
        check(self.alpha > 0, f"alpha={self.alpha} must be > 0")
        known = ", ".join(ADAPTABLE)
        for name in self.targets:
            check(name in ADAPTABLE, f"targets={name!r} must be some of {known}")
        check(
            len(set(self.targets)) == len(self.targets) > 0,
            f"targets={self.targets} must be one or more, each once",
        )

    @property
    def scale(self) -> float:
        """What the product of an adapter's two matrices is multiplied by."""
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """How experts are kept busy alike."""

    balance: str = "none"  # none | bias, which the model's routers must have | aux, a loss
    rate: float = 0.0  # change of a bias by an update; coefficient of the loss

    def __post_init__(self) -> None:
        known = ("none", "bias", "aux")
        check(self.balance in known, f"balance={self.balance} must be one of {', '.join(known)}")
        check(
            self.rate > 0 if self.balance != "none" else self.rate == 0,
            f"rate={self.rate} must be {'> 0' if self.balance != 'none' else '0'} "
            f"where balance={self.balance}",
        )


@dataclass(frozen=True, kw_only=True)
class HostsConfig:
    """The processes that one mesh spans, one on each host."""

    coordinator: str | None = None  # HOST:PORT of process 0; auto: the cluster tells; null: alone
    processes: int | None = None  # how many there are; null: the cluster tells
    process: int | None = None  # number of this one

    def __post_init__(self) -> None:
        told = self.coordinator is not None and self.coordinator != "auto"
        for name in ("processes", "process"):
            value = getattr(self, name)
            check(
                told == (value is not None),
                f"{name}={value}: coordinator=HOST:PORT, processes and process go together",
            )
        if self.processes is not None and self.process is not None:
            check(
                0 <= self.process < self.processes,
                f"process={self.process} must be from 0 to processes={self.processes} - 1",
            )


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    """Limits of one session; None: no limit.

    Tokens are those sampled. What a prompt costs depends on what a cache has of it, and so on
    what else is served; what an agent spends must not.
    """

    requests: int | None = None  # calls, those that fail too
    tokens: int | None = None  # sampled
    seconds: float | None = None  # from when the session was opened, or from its first call

    def __post_init__(self) -> None:
        for name in ("requests", "tokens", "seconds"):
            value = getattr(self, name)
            check(value is None or value > 0, f"budget.{name}={value} must be positive or null")
