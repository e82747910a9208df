"""What the command `experiments.serve` takes."""

from dataclasses import dataclass, field

from experiments.watch import WatchConfig
from forge_jax.config import (
    ENGINES,
    ExternalConfig,
    MeshConfig,
    RolloutConfig,
    check,
    check_engine,
)
from forge_jax.gateway.config import GatewayConfig
from forge_jax.models.chat import REASONING_FORMATS, TOOL_FORMATS
from forge_jax.rolling import CertainConfig
from forge_jax.rollout.router.live import RouterConfig

KINDS = (*ENGINES, "scripted")
DEFAULT_CONTEXT = 2048  # tokens, where the model allows more and nobody asks


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """`RolloutConfig`, with a context that may be left to the model."""

    slots: int = 8
    context: int | None = None
    page: int = 16
    pages: int | None = None
    places: int | None = None
    chunk: int = 256
    prefix_cache: bool = True
    deterministic: bool = False
    decode_steps: int = 4
    dtype: str | None = None
    host_pages: int = 0
    store: str | None = None
    shaping: bool = True
    top_logprobs: int = 20
    prompt_logprobs: int | None = 20
    support: int = 64
    speculate: str = "off"
    drafts: int = 2
    certain: CertainConfig = field(default_factory=CertainConfig)

    def __post_init__(self) -> None:
        self.of(1)

    def of(self, most: int) -> RolloutConfig:
        """The sizes for a model with a context of `most`."""
        context = min(most, DEFAULT_CONTEXT) if self.context is None else self.context
        return RolloutConfig(
            slots=self.slots,
            context=context,
            page=self.page,
            pages=self.pages,
            places=self.places,
            chunk=self.chunk,
            prefix_cache=self.prefix_cache,
            deterministic=self.deterministic,
            decode_steps=self.decode_steps,
            dtype=self.dtype,
            host_pages=self.host_pages,
            store=self.store,
            shaping=self.shaping,
            top_logprobs=self.top_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            support=self.support,
            speculate=self.speculate,
            drafts=self.drafts,
            certain=self.certain,
        )


@dataclass(frozen=True, kw_only=True)
class Config:
    """One server."""

    model: str | None = None
    engine: str = "real"
    script: str | None = None  # rules of a scripted engine
    engine_url: str | None = None  # of an engine elsewhere
    external: ExternalConfig = field(default_factory=ExternalConfig)
    host: str = "127.0.0.1"
    port: int = 0  # 0 takes a free one
    admin_key: str | None = None  # None: generated, and written to a file
    tool_format: str | None = None  # how the model writes tool calls; None: as its template does
    reasoning: str | None = None  # ... and reasons before an answer
    seed: int = 0  # initialises a preset, and draws the seeds of requests without one
    rollout: Sizes = field(default_factory=Sizes)
    mesh: MeshConfig = field(default_factory=MeshConfig)  # that each real engine runs on
    prefill: MeshConfig | None = None  # of further devices, that prompts are computed on
    replicas: int = 1  # engines; a router spreads requests over several
    router: RouterConfig = field(default_factory=RouterConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)

    def __post_init__(self) -> None:
        check(self.engine in KINDS, f"engine={self.engine!r} must be one of {KINDS}")
        check_engine(self.engine, self.engine_url, self.external)
        fixed = ExternalConfig()
        check(
            (self.external.update, self.external.folder) == (fixed.update, fixed.folder),
            "external.update and external.folder go with training: nobody replaces weights here",
        )
        check(0 <= self.port < 65536, f"port={self.port} must be from 0 to 65535")
        check(self.replicas >= 1, f"replicas={self.replicas} must be at least 1")
        check(self.admin_key != "", "admin_key='' must not be empty")
        check(
            self.tool_format in (None, *TOOL_FORMATS),
            f"tool_format={self.tool_format!r} must be one of {TOOL_FORMATS}, or null",
        )
        check(
            self.reasoning in (None, *REASONING_FORMATS),
            f"reasoning={self.reasoning!r} must be one of {REASONING_FORMATS}, or null",
        )
        self._check_engine()

    def _check_engine(self) -> None:
        """Raises ValueError where a key goes with another engine."""
        scripted = self.engine == "scripted"
        check(scripted or self.model is not None, f"model=null: engine={self.engine} needs a model")
        check(not scripted or self.script is not None, "script=null: engine=scripted needs one")
        check(
            scripted or self.script is None,
            f"script={self.script!r} goes with engine=scripted and with no other",
        )
        real, sized = self.engine == "real", Sizes(context=self.rollout.context)
        check(
            real or self.replicas == 1,
            f"replicas={self.replicas} goes with engine=real: one engine={self.engine} is enough",
        )
        check(
            real or (self.mesh == MeshConfig() and self.prefill is None),
            f"mesh goes with engine=real: engine={self.engine} computes nothing that it could cut",
        )
        check(
            real or self.rollout == sized,
            f"rollout but for context goes with engine=real: engine={self.engine} is sized where "
            "it runs",
        )
        check(
            not scripted or self.rollout.context is None,
            "rollout.context goes with other engines: a script ends where it says",
        )
