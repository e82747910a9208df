"""What a server tells of its engine: metrics, a log of requests, reports of a watchdog."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from forge_jax.config import UserError, check
from forge_jax.rollout.observe.exposition import Exposition, Stats
from forge_jax.rollout.observe.request_log import RequestLog
from forge_jax.rollout.observe.watchdog import Watchdog
from forge_jax.rollout.observe.watched import Observer, Watched
from forge_jax.types import Engine


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """See docs/rollout.md, "Observability"."""

    log: str | None = None  # file that a line is added to for every request; null: none is
    still_seconds: float | None = 120.0  # without any token, until stacks are dumped; null: never

    def __post_init__(self) -> None:
        seconds = self.still_seconds
        check(seconds is None or seconds > 0, f"still_seconds={seconds} must be > 0")


@contextmanager
def watched(
    cfg: WatchConfig, engine: Engine, stats: Stats, model: str
) -> Iterator[tuple[Engine, Callable[[], str]]]:
    """The engine with its observers, and its exposition for /metrics.

    Raises UserError where the log cannot be written.
    """
    exposition = Exposition(model, stats)
    observers: list[Observer] = [exposition]
    with ExitStack() as stack:
        if cfg.log is not None:
            try:
                file = stack.enter_context(open(cfg.log, "a", buffering=1, encoding="utf-8"))
            except OSError as error:
                raise UserError(f"watch.log={cfg.log!r}: {error.strerror}") from error
            observers.append(RequestLog(file.write))
        if cfg.still_seconds is not None:
            dog = Watchdog(cfg.still_seconds, stats, sys.stderr)
            observers.append(stack.enter_context(dog))
        yield Watched(engine, observers), exposition.text
