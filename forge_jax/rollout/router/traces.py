"""Traces of agents' calls: prefixes that are shared, lengths and pauses with heavy tails.

Sizes and a seed flow in, sessions flow out; the same sizes and seed give the same trace on
every machine, and no policy changes it.

A *group* of `group` sessions plays one task and begins at one moment; groups arrive as a
Poisson process. A session's first prompt is a system prompt (one of `systems`, drawn by a Zipf
law), then the task's own text, then the first turn. Each further call appends the reply to the
one before and a new turn, `pause` after that reply. Lengths and pauses are log-normal about
their medians with `spread` as the standard deviation of the logarithm: at 1.2 the longest of a
thousand is about 40 times the median.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from forge_jax.config import check
from forge_jax.rollout.router.index import Block

BLOCK = 256  # tokens of a block: simulated caches keep and evict as many at once


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """What a trace is like. Lengths are medians in tokens, times medians in seconds."""

    systems: int = 8  # different system prompts; 0: none
    system: int = 2048
    group: int = 1  # sessions that play one task
    task: int = 512
    calls: int = 8  # of a session
    turn: int = 256  # tokens that a call adds beside the reply before it
    reply: int = 128
    pause: float = 5.0
    spread: float = 0.5
    longest: int = 32_768  # tokens of a prompt with its reply; a session ends before more
    rate: float = 0.1  # sessions a second, of each instance
    sessions: int = 40  # of each instance

    def __post_init__(self) -> None:
        for name in ("systems", "pause", "spread"):
            check(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must be >= 0")
        for name in ("system", "group", "task", "calls", "turn", "reply", "longest", "sessions"):
            check(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        check(self.rate > 0, f"rate={self.rate} must be > 0")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One call of a session: what it adds to the prompt, and what is replied."""

    added: tuple[Block, ...]
    reply: tuple[Block, ...]
    pause: float  # seconds after the reply before


@dataclass(frozen=True, kw_only=True)
class Session:
    """Calls of which each begins with the prompt and the reply of the one before."""

    name: str
    start: float
    turns: tuple[Turn, ...]


def trace(cfg: TraceConfig, instances: int, seed: int) -> list[Session]:
    """The sessions of a trace for so many instances, by their start."""
    # Text seeds are hashed the same way in every process.
    draw = random.Random(f"{seed}/{instances}/{cfg!r}")
    maker = _Maker(cfg, draw)
    systems = [maker.blocks(cfg.system) for _ in range(cfg.systems)]
    popular = [1 / (rank + 1) for rank in range(cfg.systems)]
    sessions: list[Session] = []
    now = 0.0
    while len(sessions) < cfg.sessions * instances:
        now += draw.expovariate(cfg.rate * instances / cfg.group)
        shared = draw.choices(systems, popular)[0] if systems else ()
        shared = (*shared, *maker.blocks(maker.length(cfg.task)))
        for _ in range(cfg.group):
            name = f"session-{len(sessions)}"
            sessions.append(Session(name=name, start=now, turns=tuple(maker.turns(shared))))
    return sessions


class _Maker:
    """Draws blocks with keys that nothing else has."""

    def __init__(self, cfg: TraceConfig, draw: random.Random):
        self._cfg = cfg
        self._draw = draw
        self._keys = 0

    def length(self, median: float) -> int:
        return max(1, round(self.tailed(median)))

    def tailed(self, median: float) -> float:
        return median * math.exp(self._draw.gauss(0.0, self._cfg.spread))

    def blocks(self, tokens: int) -> tuple[Block, ...]:
        """As many as it takes; the last may be short."""
        sizes = [BLOCK] * (tokens // BLOCK) + [tokens % BLOCK] * (tokens % BLOCK > 0)
        first, self._keys = self._keys, self._keys + len(sizes)
        return tuple(Block(first + place, size) for place, size in enumerate(sizes))

    def turns(self, shared: tuple[Block, ...]) -> Iterator[Turn]:
        """At least one call; its lengths are cut to what a prompt may have."""
        cfg, total = self._cfg, sum(block.tokens for block in shared)
        for number in range(cfg.calls):
            added, reply = self.length(cfg.turn), self.length(cfg.reply)
            total += added + reply
            if number > 0 and total > cfg.longest:
                return
            first = shared if number == 0 else ()
            yield Turn(
                added=(*first, *self.blocks(added)),
                reply=self.blocks(reply),
                pause=self.tailed(cfg.pause) if number else 0.0,
            )
