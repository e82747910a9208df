"""Frozen, validated configurations; `load` builds them from mappings."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from forge_jax.crediting import CreditConfig as CreditConfig
from forge_jax.crediting import FaultConfig as FaultConfig
from forge_jax.crediting import RewardConfig as RewardConfig
from forge_jax.crediting import Weights as Weights
from forge_jax.domains import CurriculumConfig as CurriculumConfig
from forge_jax.domains import Domain as Domain
from forge_jax.domains import DomainConfig as DomainConfig
from forge_jax.domains import FilterConfig as FilterConfig
from forge_jax.domains import StageConfig as StageConfig
from forge_jax.domains import check_domains, check_filter, check_rewards, check_stages
from forge_jax.domains import mixture as mixture
from forge_jax.drawing import COLDEST, HOTTEST
from forge_jax.loading import UserError as UserError
from forge_jax.loading import check as check
from forge_jax.loading import load as load
from forge_jax.managing import ContextConfig as ContextConfig
from forge_jax.objective import RATIO_CAP, check_cap, check_kl
from forge_jax.objective import LossConfig as LossConfig
from forge_jax.parts import ADAPTABLE as ADAPTABLE
from forge_jax.parts import BudgetConfig as BudgetConfig
from forge_jax.parts import HostsConfig as HostsConfig
from forge_jax.parts import LoraConfig as LoraConfig
from forge_jax.parts import MoeConfig as MoeConfig
from forge_jax.parts import MtpConfig as MtpConfig
from forge_jax.programs import ProgramConfig as ProgramConfig
from forge_jax.protection import ProtectConfig as ProtectConfig
from forge_jax.protection import Skip as Skip
from forge_jax.rolling import DTYPES as DTYPES
from forge_jax.rolling import ENGINES as ENGINES
from forge_jax.rolling import UPDATES as UPDATES
from forge_jax.rolling import CertainConfig as CertainConfig
from forge_jax.rolling import ExternalConfig as ExternalConfig
from forge_jax.rolling import RolloutConfig as RolloutConfig
from forge_jax.rolling import check_engine as check_engine
from forge_jax.scheduling import SchedConfig as SchedConfig
from forge_jax.scheduling import TuningConfig as TuningConfig
from forge_jax.tool_servers import ToolsConfig as ToolsConfig

REMAT = ("none", "block", "attention", "offload")  # see `forge_jax.models.remat`


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, with a linear warm-up and a linear decay of its rate."""

    learning_rate: float = 1e-3
    warmup_steps: int = 0
    decay_steps: int = 0  # step at which the rate has fallen to final_share; 0: it never falls
    final_share: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-15
    weight_decay: float = 0.0
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        check(self.learning_rate > 0, f"learning_rate={self.learning_rate} must be > 0")
        check(self.warmup_steps >= 0, f"warmup_steps={self.warmup_steps} must be >= 0")
        check(self.decay_steps >= 0, f"decay_steps={self.decay_steps} must be >= 0")
        check(0 <= self.final_share <= 1, f"final_share={self.final_share} must be in [0, 1]")
        check(0 <= self.beta1 < 1, f"beta1={self.beta1} must be in [0, 1)")
        check(0 <= self.beta2 < 1, f"beta2={self.beta2} must be in [0, 1)")
        check(self.eps > 0, f"eps={self.eps} must be > 0")
        check(self.weight_decay >= 0, f"weight_decay={self.weight_decay} must be >= 0")
        check(self.clip_norm > 0, f"clip_norm={self.clip_norm} must be > 0")


@dataclass(frozen=True, kw_only=True)
class WarmConfig:
    """Supervised warm start on scripted play, and the gate that RL waits behind."""

    steps: int = 300
    batch: int = 64  # scripted episodes a step
    demonstrations: int | None = None  # the agent plays so many to imitate; null: the family's play
    gate: float = 0.3  # success of the warm-started policy below which RL does not start
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=3e-3))

    def __post_init__(self) -> None:
        check(self.steps >= 0, f"steps={self.steps} must be >= 0")
        check(self.batch >= 1, f"batch={self.batch} must be at least 1")
        wanted = self.demonstrations is None or self.demonstrations >= 1
        check(wanted, f"demonstrations={self.demonstrations} must be at least 1")
        check(
            self.demonstrations is None or self.steps > 0,
            f"demonstrations={self.demonstrations}: steps=0 imitates none",
        )
        check(0 <= self.gate < 1, f"gate={self.gate} must be in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class PackConfig:
    """Sizes of a micro-batch."""

    budget: int = 8192  # unique tokens of a micro-batch
    tile: int | None = None  # side of an attention tile; None: what suits the device
    bucket_ratio: float = 1.25  # growth of the padded sizes: 2 compiles least, 1.1 pads least

    def __post_init__(self) -> None:
        check(self.budget >= 1, f"budget={self.budget} must be at least 1")
        check(self.tile is None or self.tile >= 1, f"tile={self.tile} must be at least 1")
        check(self.bucket_ratio > 1, f"bucket_ratio={self.bucket_ratio} must be > 1")

    @property
    def side(self) -> int:
        """Side of a tile: where nobody chose one for a device, what suits a CPU."""
        return 64 if self.tile is None else self.tile


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Held-out evaluation through the gateway."""

    episodes: int = 256
    every: int | None = None  # updates from one evaluation to the next; null: first and last alone
    concurrency: int = 64
    temperature: float = 1.0  # 0 is greedy
    seed: int = 0  # of the tasks and of what is sampled

    def __post_init__(self) -> None:
        check(self.episodes >= 1, f"episodes={self.episodes} must be at least 1")
        check(self.every is None or self.every >= 1, f"every={self.every} must be at least 1")
        check(self.concurrency >= 1, f"concurrency={self.concurrency} must be at least 1")
        drawn = self.temperature == 0 or COLDEST <= self.temperature <= HOTTEST
        wanted = f"0, or from {COLDEST:g} to {HOTTEST:g}"
        check(drawn, f"temperature={self.temperature} must be {wanted}")
        check(self.seed >= 0, f"seed={self.seed} must be >= 0")


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices that the trainer and the engine share; the product is how many are used."""

    slice: int = 1  # replicas of everything else, each on a slice of its own
    data: int = 1  # micro-batches computed at once by ranks that keep all weights
    fsdp: int = 1  # ... that keep a part of the weights each
    expert: int = 1  # ... that keep a part of the experts each, and of other weights
    context: int = 1  # parts into which the tokens of a micro-batch are cut, and weights too
    tensor: int = 1  # parts into which heads, hidden units and vocabulary are cut

    def __post_init__(self) -> None:
        for name in ("slice", "data", "fsdp", "expert", "context", "tensor"):
            check(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")

    @property
    def places(self) -> int:
        """Micro-batches computed at once."""
        return self.slice * self.data * self.fsdp * self.expert


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Where a run reports to, beside metrics.jsonl."""

    wandb: str = "disabled"  # disabled | offline | online
    project: str = "forge_jax"

    def __post_init__(self) -> None:
        check(
            self.wandb in ("disabled", "offline", "online"),
            f"wandb={self.wandb} must be disabled, offline or online",
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    model: str  # preset of configs/model/ or a Hugging Face folder
    task: str | None  # task family; null: several, in `domains`
    steps: int  # RL updates
    domains: Mapping[str, DomainConfig] | None = None  # by name; null: `task` alone
    stages: tuple[StageConfig, ...] | None = None  # of the updates; null: shares stay as they are
    filter: FilterConfig = field(default_factory=FilterConfig)  # of what is played and consumed
    seed: int = 0
    dtype: str = "float32"  # of the layers; weights and the optimiser's state stay float32
    remat: str = "none"  # what layers keep for the backward pass
    attention: str = "auto"  # implementation of tree attention; auto: by the device
    ratio_cap: float = RATIO_CAP  # of a loss that has one
    temperature: float = 1.0  # of the rollouts
    checkpoint_every: int = 20  # updates
    checkpoints_kept: int = 2  # the newest ones
    audit_versions: int = 4  # past weights kept to check the sampler's log-probs against
    resume: str | None = None  # folder of the run to continue
    pool: str | None = None  # where finished groups are kept; null: in the run's folder
    agent: ProgramConfig | None = None  # that is trained; null: the task family's own
    tools: ToolsConfig | None = None  # MCP servers of a white-box agent in its place
    context: ContextConfig | None = None  # of a white-box agent; null: as the family has it
    engine: str = "real"  # what samples: real, our own | vllm | sglang, elsewhere
    engine_url: str | None = None  # of an engine elsewhere
    external: ExternalConfig = field(default_factory=ExternalConfig)
    warm: WarmConfig = field(default_factory=WarmConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    credit: CreditConfig = field(default_factory=CreditConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sched: SchedConfig = field(default_factory=SchedConfig)
    protect: ProtectConfig = field(default_factory=ProtectConfig)  # of the weights
    budget: BudgetConfig = field(default_factory=BudgetConfig)  # of an episode
    pack: PackConfig = field(default_factory=PackConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    mtp: MtpConfig = field(default_factory=MtpConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        check(self.steps >= 0, f"steps={self.steps} must be >= 0")
        check_domains(self.task, self.domains, self.sched.shares == "admitted")
        check_filter(self.filter, self.domains)
        check_rewards(self.reward, self.mixture)
        check_stages(self.stages, self.domains)
        sched = self.sched
        fixed = sched.shares == "items" and sched.lag_updates is None and sched.tune is None
        check(
            self.stages is None or fixed,
            "stages go with sched.shares=items, without sched.lag_updates and sched.tune",
        )
        check(
            self.eval.every is None or not self.sched.hold_updates,
            f"eval.every={self.eval.every} would measure the older weights of "
            f"sched.hold_updates={self.sched.hold_updates}",
        )
        check(
            self.sched.shares == "items" or self.domains is not None,
            f"sched.shares={self.sched.shares} goes with domains: task={self.task} is alone",
        )
        check(
            self.warm.demonstrations is None or self.task is not None,
            f"warm.demonstrations={self.warm.demonstrations} goes with task, not with domains",
        )
        check(
            self.context is None or self.task is not None,
            "context goes with task, not with domains, whose families manage theirs",
        )
        check(
            self.agent is None or self.sched.tool_seconds is None,
            f"sched.tool_seconds={self.sched.tool_seconds} is of tools of a white-box agent: an "
            "agent that is a program calls its own",
        )
        check(self.seed >= 0, f"seed={self.seed} must be >= 0")
        check(self.dtype in DTYPES, f"dtype={self.dtype!r} must be one of {DTYPES}")
        check(self.remat in REMAT, f"remat={self.remat!r} must be one of {REMAT}")
        check_cap(self.loss, self.ratio_cap)
        check_kl(self.loss, self.sched.updates * self.sched.epochs)
        check(
            COLDEST <= self.temperature <= HOTTEST,
            f"temperature={self.temperature} must be from {COLDEST:g} to {HOTTEST:g} to train",
        )
        lasting = self.pool is None or not self.pool.startswith("memory:")
        check(lasting, f"pool={self.pool} would not outlive the run's process")
        check(self.audit_versions >= 0, f"audit_versions={self.audit_versions} must be >= 0")
        check(self.engine in ENGINES, f"engine={self.engine!r} must be one of {ENGINES}")
        check_engine(self.engine, self.engine_url, self.external)
        sized = RolloutConfig(context=self.rollout.context, dtype=self.rollout.dtype)
        check(
            self.engine == "real" or self.rollout == sized,
            f"rollout but for context and dtype goes with engine=real: engine={self.engine} "
            "is sized where it runs",
        )
        check(
            not (self.lora.rank and self.mtp.weight),
            f"lora.rank={self.lora.rank} trains adapters alone, "
            f"mtp.weight={self.mtp.weight} prediction modules",
        )
        check(
            not (self.lora.rank and self.moe.balance == "bias"),
            f"lora.rank={self.lora.rank} leaves routers as they are, "
            "moe.balance=bias shifts their biases",
        )
        for name in ("checkpoint_every", "checkpoints_kept"):
            check(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be >= 1")

    @property
    def mixture(self) -> tuple[Domain, ...]:
        """The domains of the run, in their order; `task` is a domain alone."""
        return mixture(self.task, self.domains)

    @property
    def title(self) -> str:
        """What the run trains on, in a word."""
        return "+".join(domain.name for domain in self.mixture)
