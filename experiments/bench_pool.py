"""How fast a data pool takes and gives items, from one process or from several.

    python -m experiments.bench_pool pool=LOCATION [writers=1] [items=400]

Each writer is a process that puts its share of the items, one after another, and another one
then reads them all. Prints {"items", "writers", "item_bytes", "puts_per_second",
"put_mb_per_second", "put_p50_ms", "put_p99_ms", "gets_per_second", "get_mb_per_second"}; the
clock starts when all writers have opened the pool, and a writer is done when its last put is.
"""

import multiprocessing
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from experiments.command import command
from forge_jax.config import UserError, check, load
from forge_jax.sched.codec import encode
from forge_jax.sched.pool import Pool
from forge_jax.types import Episode, Finish, Outcome, Status, Task, Turn

SPAWN = multiprocessing.get_context("spawn")  # a fork would have locks of tensorstore's threads


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One measurement; see `configs/bench_pool.yaml`."""

    pool: str
    writers: int = 1
    items: int = 400
    group: int = 8
    turns: int = 4
    tokens: int = 500

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self) if f.name != "pool"):
            value = getattr(self, name)
            check(value >= 1, f"{name}={value} must be at least 1")
        check(self.items >= self.writers, f"items={self.items} < writers={self.writers}")


@command("bench_pool", plain=("pool",))
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    return bench(load(BenchConfig, mapping))


def bench(cfg: BenchConfig) -> dict[str, Any]:
    """The command's result. Raises UserError where the pool cannot be opened or has items."""
    if Pool.open(cfg.pool).items():
        raise UserError(f"pool={cfg.pool!r} has items; a measurement needs an empty pool")
    shares = [range(first, cfg.items, cfg.writers) for first in range(cfg.writers)]
    start = SPAWN.Barrier(cfg.writers)
    done: Any = SPAWN.SimpleQueue()
    writers = [SPAWN.Process(target=write, args=(cfg, share, start, done)) for share in shares]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        if writer.exitcode:
            raise RuntimeError(f"a writer ended with status {writer.exitcode}")
    began, ended, each = zip(*(done.get() for _ in writers), strict=True)
    puts, gets = max(ended) - min(began), read(cfg)
    size = len(encode(episodes(cfg, 0)))
    milliseconds = 1e3 * np.concatenate(each)
    return {
        "items": cfg.items,
        "writers": cfg.writers,
        "item_bytes": size,
        "puts_per_second": cfg.items / puts,
        "put_mb_per_second": cfg.items * size / puts / 1e6,
        "put_p50_ms": float(np.quantile(milliseconds, 0.5)),
        "put_p99_ms": float(np.quantile(milliseconds, 0.99)),
        "gets_per_second": cfg.items / gets,
        "get_mb_per_second": cfg.items * size / gets / 1e6,
    }


def write(cfg: BenchConfig, share: range, start: Any, done: Any) -> None:
    """Puts a share of the items; tells when it began and ended, and the seconds of each put."""
    pool, groups = Pool.open(cfg.pool), {item: episodes(cfg, item) for item in share}
    start.wait()
    times = [time.monotonic()]  # of one clock for all processes of a machine
    for item, group in groups.items():
        pool.put(item, group)
        times.append(time.monotonic())
    done.put((times[0], times[-1], np.diff(times)))


def read(cfg: BenchConfig) -> float:
    """Seconds that reading every item takes."""
    pool, began = Pool.open(cfg.pool), time.monotonic()
    for item in range(cfg.items):
        pool.get(item)
    return time.monotonic() - began


def episodes(cfg: BenchConfig, item: int) -> tuple[Episode, ...]:
    """An item of the size that is asked for."""
    rng = np.random.default_rng(item)

    def turn() -> Turn:
        prompt, output = rng.integers(0, 2**17, (2, cfg.tokens)).astype(np.int32)
        return Turn(
            prompt=prompt, output=output, logprobs=-rng.random(cfg.tokens, np.float32),
            versions=np.zeros(cfg.tokens, np.int32), temperature=1.0, finish=Finish.STOP,
            parent=None, start=0.0, seconds=1.0, queue_seconds=0.0,
        )  # fmt: skip

    return tuple(
        Episode(
            item=item,
            replica=replica,
            task=Task(family="hop", seed=item),
            outcome=Outcome(status=Status.COMPLETED, reward=1.0),
            turns=tuple(turn() for _ in range(cfg.turns)),
        )
        for replica in range(cfg.group)
    )


if __name__ == "__main__":
    main()
