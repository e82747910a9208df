"""What all calls of a gateway share."""

from dataclasses import dataclass

from forge_jax.gateway.config import GatewayConfig
from forge_jax.gateway.metrics import Metrics
from forge_jax.gateway.sessions import Sessions
from forge_jax.models.chat import Chat
from forge_jax.types import Engine


@dataclass(frozen=True, kw_only=True, eq=False)
class Core:
    """What every call needs, and shares."""

    engine: Engine
    chat: Chat
    model: str
    config: GatewayConfig
    sessions: Sessions
    metrics: Metrics
