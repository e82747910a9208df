"""One path trained in a process of its own, whole or carried from block to block.

    python -m experiments.bench.long_worker

A job and lines that ask for the next piece come in, as of `experiments.bench.worker`; a piece
is a block. The last answer has loss, memory over time and where the gradients were written.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.worker import serve
from experiments.models import resolve
from forge_jax.config import PackConfig
from forge_jax.models.hf import flat_names
from forge_jax.rl import carry, step
from forge_jax.rl.forward import tiled
from forge_jax.rl.step import StepConfig
from forge_jax.sched.pack import micro_batches
from forge_jax.types import CarriedTree, PackedTree, Sample

EVERY = 0.05  # seconds between two looks at the memory


@dataclass(frozen=True, kw_only=True)
class PathJob:
    """One update's gradients of one path."""

    model: str
    tokens: int
    budget: int
    tile: int | None
    seed: int
    grads: str  # .npz to write them to


@contextmanager
def memory() -> Iterator[list[tuple[float, int]]]:
    """(seconds, resident bytes) of this process, again and again while inside."""
    seen: list[tuple[float, int]] = []
    began, over = time.perf_counter(), threading.Event()

    def look() -> None:
        while not over.is_set():
            seen.append((time.perf_counter() - began, resident()))
            over.wait(EVERY)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def resident() -> int:
    """Bytes of memory that this process has now."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def path_of(job: PathJob, vocab: int) -> Sample:
    """Random tokens, every other one trained."""
    rng = np.random.default_rng(job.seed)
    mask = np.arange(job.tokens) % 2 == 1
    return Sample(
        tokens=rng.integers(0, vocab, job.tokens).astype(np.int32),
        mask=mask,
        old_logp=np.where(mask, -np.log(vocab), 0).astype(np.float32),
        advantage=np.where(mask, rng.normal(1, 0.3, job.tokens), 0).astype(np.float32),
    )


def train(said: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """{"blocks": done, "of": all} as they are done, then the result."""
    job = PathJob(**said)
    model = resolve(job.model, job.seed)
    sample = path_of(job, model.cfg.vocab)
    pack = PackConfig(budget=job.budget, tile=job.tile, bucket_ratio=1.02)
    pack = tiled(pack, "auto", "float32")
    cfg = StepConfig(model=model.cfg, tile=pack.side)
    [part] = micro_batches([sample], "tree", pack)
    trained = int(sample.mask.sum())
    blocks = len(part.start) if isinstance(part, CarriedTree) else 1
    with memory() as seen:
        loss, sums = 0.0, None
        began = time.perf_counter()
        for done, (terms, grads) in enumerate(shares(model.params, part, float(trained), cfg), 1):
            sums = grads if sums is None else jax.tree.map(jnp.add, sums, grads)
            loss += float(np.sum(np.asarray(terms), dtype=np.float64)) / trained
            yield {"blocks": done, "of": blocks}
        jax.block_until_ready(sums)
        seconds = time.perf_counter() - began
    assert sums is not None
    np.savez(job.grads, allow_pickle=False, **flat_names(model.cfg, sums))
    kept = carry.kept_bytes(part, cfg) if isinstance(part, CarriedTree) else 0
    yield {"loss": loss, "seconds": seconds, "memory": seen, "kept_bytes": kept}


def shares(
    params: Any, part: PackedTree | CarriedTree, denominator: float, cfg: StepConfig
) -> Iterator[tuple[Any, Any]]:
    """Terms of the loss and gradients, block by block."""
    if isinstance(part, CarriedTree):
        for _, grads, _, _, terms in carry.gradients(params, part, denominator, cfg):
            yield terms, grads
    else:
        grads, _, _, terms = step.gradients(params, step.to_batch(part, cfg), denominator, cfg)
        yield terms, grads


if __name__ == "__main__":
    serve(train)
