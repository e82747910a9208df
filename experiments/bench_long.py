"""One path far beyond the budget, trained in bounded memory.

    python -m experiments.bench_long [model=micro] [tokens=65536] [budget=4096] [compare=8192]

Four processes compute the gradients of one path each, one after the other, and their memory is
watched: a path of `budget` tokens in one piece; one of `compare` tokens in one piece, and
again with keys and values carried over blocks of `budget` tokens, which must agree; and one of
`tokens`, carried. The run folder holds memory.png.
"""

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from hydra.core.hydra_config import HydraConfig
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from experiments.bench.children import Child
from experiments.bench.long_worker import PathJob
from experiments.bench.plots import draw_memory
from experiments.command import command
from forge_jax.config import check, load

WORKER = (sys.executable, "-m", "experiments.bench.long_worker")
TOLERANCE = 1e-5  # relative, in fp32


@dataclass(frozen=True, kw_only=True)
class LongConfig:
    """See `configs/bench_long.yaml`."""

    model: str
    tokens: int = 65_536
    budget: int = 4096
    compare: int = 8192
    tile: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check(self.budget >= 1, f"budget={self.budget} must be at least 1")
        for name in ("tokens", "compare"):
            value = getattr(self, name)
            check(value > self.budget, f"{name}={value} must be beyond budget={self.budget}")


@command("bench_long")
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    cfg = load(LongConfig, mapping)
    jax.config.update("jax_platforms", "cpu")  # of this process; devices are for its children
    return run(cfg, Path(HydraConfig.get().runtime.output_dir))


def run(cfg: LongConfig, folder: Path) -> dict[str, Any]:
    """The command's result. Raises RuntimeError where whole and carried disagree."""
    console = Console(stderr=True)
    jobs = {
        "budget": (cfg.budget, cfg.budget),
        "whole": (cfg.compare, cfg.compare),
        "carried": (cfg.compare, cfg.budget),
        "long": (cfg.tokens, cfg.budget),
    }
    with Progress(console=console) as bars:
        found = {name: measured(name, *job, cfg, folder, bars) for name, job in jobs.items()}
    loss, grads = differences(found, folder)
    if max(loss, grads) > TOLERANCE:
        raise RuntimeError(f"whole and carried differ: loss {loss:.1e}, gradients {grads:.1e}")
    draw_memory(folder / "memory.png", found, jobs)
    console.print(report(found, jobs))
    console.print(f"whole and carried agree: loss to {loss:.1e}, gradients to {grads:.1e}")
    long = found["long"]
    return {
        "tokens": cfg.tokens,
        "budget": cfg.budget,
        "compare": cfg.compare,
        "loss_difference": loss,
        "gradient_difference": grads,
        "seconds": long["seconds"],
        "kept_bytes": long["kept_bytes"],
        **{f"rss_{name}_bytes": grown(one) for name, one in found.items()},
        "model": cfg.model,
        "run_dir": str(folder),
    }


def measured(
    name: str, tokens: int, budget: int, cfg: LongConfig, folder: Path, bars: Progress
) -> dict[str, Any]:
    """The result of one path's process, which tells of every block."""
    bar = bars.add_task(f"{tokens:,} tokens in blocks of {budget:,}", total=None)
    job = PathJob(
        model=cfg.model,
        tokens=tokens,
        budget=budget,
        tile=cfg.tile,
        seed=cfg.seed,
        grads=str(folder / f"{name}.npz"),
    )
    with Child(name, dataclasses.asdict(job), folder / f"{name}.log", WORKER) as child:
        answer = child.ask()
        while "blocks" in answer:
            bars.update(bar, completed=answer["blocks"], total=answer["of"])
            answer = child.ask()
    return answer


def differences(found: Mapping[str, Any], folder: Path) -> tuple[float, float]:
    """Relative differences of loss and, in L2 over all of them, gradients of whole and carried."""
    whole, carried = (dict(np.load(folder / f"{name}.npz")) for name in ("whole", "carried"))
    square = sum(np.sum((whole[k] - carried[k]).astype(np.float64) ** 2) for k in whole)
    norm = sum(np.sum(x.astype(np.float64) ** 2) for x in whole.values())
    loss = found["whole"]["loss"]
    return abs(found["carried"]["loss"] - loss) / abs(loss), float(np.sqrt(square / norm))


def grown(one: Mapping[str, Any]) -> int:
    """Bytes by which a process was larger than before it began to compute."""
    bytes_ = [size for _, size in one["memory"]]
    return max(bytes_) - bytes_[0]


def report(found: Mapping[str, Any], jobs: Mapping[str, tuple[int, int]]) -> Table:
    table = Table("tokens", "budget", "seconds", "memory, MiB", "of it kept, MiB")
    for name, (tokens, budget) in jobs.items():
        one = found[name]
        sizes = (f"{size / 2**20:,.0f}" for size in (grown(one), one["kept_bytes"]))
        table.add_row(f"{tokens:,}", f"{budget:,}", f"{one['seconds']:.1f}", *sizes)
    return table


if __name__ == "__main__":
    main()
