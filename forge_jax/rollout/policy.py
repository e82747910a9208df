"""What a trainer needs of the engine that samples for it, whether ours or one elsewhere."""

from collections.abc import Mapping
from typing import Any, Protocol

from forge_jax.types import Engine


class PolicyEngine(Engine, Protocol):
    """An engine whose weights a trainer replaces."""

    def stats(self) -> Mapping[str, float]:
        """Gauges and running totals, for logs and metrics."""
        ...

    async def warm_up(self) -> None:
        """Everything that takes long before the first request; comes before `serve`."""
        ...

    async def serve(self) -> None:
        """Runs until cancelled; then every request ends. Raises a fault of the engine."""
        ...

    async def swap(self, version: int, params: Any) -> None:
        """Samples from `params`, as `version`, from now on; the caller may donate them after."""
        ...
