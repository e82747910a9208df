"""A simulated instance: prompts prefilled one after the other, sequences decoded meanwhile.

Jobs flow in, first tokens and ends flow out. Between two events every rate is constant, so
time passes in one step however many tokens are decoded in it: a round is one chunk of prefill,
if there is any to do, and one decode step of all running sequences.
"""

import heapq
import math
from dataclasses import dataclass, field

from forge_jax.config import check
from forge_jax.rollout.router.cache import Cache
from forge_jax.rollout.router.cost import Prefill
from forge_jax.rollout.router.index import Block

EPSILON = 1e-9  # seconds, and tokens: what rounding may leave of an amount


@dataclass(frozen=True, kw_only=True)
class InstanceConfig:
    """One instance; the defaults are of the order of an 8B model on one accelerator."""

    slots: int = 48
    memory: int = 400_000  # tokens of keys and values, running ones included
    base: float = 0.01  # seconds of a prefill, however short
    token: float = 1e-4  # ... of a token computed
    pair: float = 3e-9  # ... of a (query, key) pair
    chunk: float = 0.05  # seconds of prefill between two decode steps
    step: float = 0.012  # seconds of a decode step
    row: float = 3e-4  # ... of each sequence in it
    noise: float = 0.1  # standard deviation of the logarithm of a prefill's time

    def __post_init__(self) -> None:
        check(self.slots >= 1, f"slots={self.slots} must be at least 1")
        check(self.memory >= 1, f"memory={self.memory} must be at least 1")
        for name in ("base", "token", "pair", "noise"):
            check(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must be >= 0")
        for name in ("chunk", "step", "row"):
            check(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be > 0")

    @property
    def prefill(self) -> Prefill:
        """What a prefill takes where nothing decodes."""
        return Prefill(base=self.base, token=self.token, pair=self.pair)


@dataclass(kw_only=True, eq=False)
class Job:
    """One call at an instance."""

    number: int
    blocks: tuple[Block, ...]  # of the prompt
    tokens: int
    reply: tuple[Block, ...]
    replied: int  # tokens of the reply
    noise: float  # factor of its prefill's time
    sent: float
    ready: bool = True  # nothing is being fetched for it
    fetched: int = 0  # tokens of its prefix that wait for it in the host's memory
    began: float = 0.0
    cached: int = 0  # tokens of its prompt that are not computed
    reserved: int = 0
    pinned: list[Block] = field(default_factory=list)


class Instance:
    """The state of one instance at the moment it was last advanced to."""

    def __init__(self, cfg: InstanceConfig, cache: Cache):
        self.cache = cache
        self.stamp = 0  # of the newest state: an event foreseen in an older one is void
        self._cfg = cfg
        self._now = 0.0
        self._waiting: dict[int, Job] = {}
        self._job: Job | None = None  # whose prompt is prefilled
        self._work = 0.0  # seconds of prefill that are left of it
        self._steps = 0.0  # decode steps so far
        self._running: list[tuple[float, int, Job]] = []  # heap of (step of the last token, ...)

    def submit(self, job: Job) -> None:
        self._waiting[job.number] = job

    def advance(self, now: float) -> tuple[Job | None, list[Job]]:
        """Lets time pass up to `now`; gives the job whose first token came, and those that
        ended. `now` is not past the moment that `next` foretold."""
        passed, self._now = now - self._now, now
        steps, work = self._rates()
        self._steps += steps * passed
        self._work -= work * passed
        ended = []
        while self._running and self._running[0][0] <= self._steps + EPSILON:
            ended.append(heapq.heappop(self._running)[2])
        for job in ended:
            self._finish(job)
        first = self._job if self._job is not None and self._work <= EPSILON else None
        if first is not None:
            self._decode(first)
        return first, ended

    def begin(self) -> None:
        """Begins with the next prompt if it can; to be called after every change."""
        self.stamp += 1
        if self._job is not None or len(self._running) >= self._cfg.slots:
            return
        job = next((job for job in self._waiting.values() if job.ready), None)
        if job is None:
            return
        here = self.cache.prefix(job.blocks)
        pinned = path(job.blocks, here)
        self.cache.pin(pinned)
        wanted = job.tokens - here + job.replied
        if not self.cache.reserve(wanted):
            self.cache.unpin(pinned)
            return
        del self._waiting[job.number]
        job.began, job.pinned, job.reserved = self._now, pinned, wanted
        job.cached = max(here, job.fetched)
        self._job = job
        self._work = job.noise * self._cfg.prefill.seconds(job.tokens, job.cached)

    def next(self) -> float:
        """When something happens here next, if nothing comes from outside."""
        steps, work = self._rates()
        prefilled = self._now + max(self._work, 0.0) / work if self._job is not None else math.inf
        if not self._running:
            return prefilled
        ended = self._now + max(self._running[0][0] - self._steps, 0.0) / steps
        return min(prefilled, ended)

    @property
    def step_seconds(self) -> float:
        """Of a decode step of what runs."""
        return self._cfg.step + self._cfg.row * len(self._running)

    def _rates(self) -> tuple[float, float]:
        """Decode steps and seconds of prefill done in a second."""
        if self._job is None:
            return 1 / self.step_seconds, 0.0
        if not self._running:
            return 0.0, 1.0
        chunk = self._cfg.chunk
        return 1 / (chunk + self.step_seconds), chunk / (chunk + self.step_seconds)

    def _decode(self, job: Job) -> None:
        """The prompt's blocks can be read by others from here on."""
        self._job = None
        self.cache.release(job.reserved - job.replied)
        self.cache.insert(job.blocks)
        self.cache.pin(job.blocks)
        self.cache.unpin(job.pinned)
        job.pinned, job.reserved = list(job.blocks), job.replied
        heapq.heappush(self._running, (self._steps + job.replied, job.number, job))

    def _finish(self, job: Job) -> None:
        self.cache.release(job.reserved)
        self.cache.unpin(job.pinned)
        self.cache.insert((*job.blocks, *job.reply))


def path(blocks: tuple[Block, ...], tokens: int) -> list[Block]:
    """The blocks that hold the first `tokens`."""
    found, seen = [], 0
    for block in blocks:
        if seen >= tokens:
            break
        found.append(block)
        seen += block.tokens
    return found
