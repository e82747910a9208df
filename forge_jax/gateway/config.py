"""Limits of a gateway."""

from dataclasses import dataclass, field

from forge_jax.config import BudgetConfig, check


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """What a gateway takes and keeps, and how long it waits."""

    undeclared: bool = True  # False: calls of sessions nobody opened are refused
    budget: BudgetConfig = field(default_factory=BudgetConfig)  # of a session not opened with one
    max_body_bytes: int = 32 * 2**20
    keep_tokens: int = 32 * 2**20  # tokens recorded of undeclared sessions
    keep_alive_seconds: float = 10.0  # silence in a stream before a comment is sent
    drain_seconds: float = 10.0  # how long running calls may go on when the server stops

    def __post_init__(self) -> None:
        check(self.max_body_bytes > 0, f"max_body_bytes={self.max_body_bytes} must be positive")
        check(self.keep_tokens >= 0, f"keep_tokens={self.keep_tokens} must be >= 0")
        check(
            self.keep_alive_seconds > 0,
            f"keep_alive_seconds={self.keep_alive_seconds} must be positive",
        )
        check(self.drain_seconds >= 0, f"drain_seconds={self.drain_seconds} must be >= 0")
