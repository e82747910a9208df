"""Tokens a CPU-second of the rollout engine with drafts and without, side by side.

    python -m experiments.bench_drafting [model=bench-10m] [speculate=ngram] [drafts=4]
        [rows=[1,4,16,64]] [prompt=64] [new_tokens=256] [temperature=0.0] [repeat=3]

Two engines of the same weights play the same requests by turns, so many at once as `rows` says.
Prints a table, and one JSON object with a row for each; depths are chosen by the engine itself,
in a first run, which is not timed, from nothing.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from experiments.command import command
from experiments.models import resolve
from forge_jax.config import RolloutConfig, check, load
from forge_jax.models.load import LoadedModel
from forge_jax.rollout.engine import RolloutEngine
from forge_jax.types import Request, Sampling

COLUMNS = ("rows", "depths", "acceptance", "tokens_per_verify", "speedup", "speedup_cpu")


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One benchmark; see `configs/bench_drafting.yaml`."""

    model: str = "bench-10m"
    speculate: str = "ngram"
    drafts: int = 4
    rows: tuple[int, ...] = (1, 4, 16, 64)
    prompt: int = 64
    new_tokens: int = 192
    temperature: float = 0.0
    decode_steps: int = 4
    repeat: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt", "new_tokens", "repeat"):
            check(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        for name in ("temperature", "seed"):
            check(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must be >= 0")
        check(min(self.rows, default=0) >= 1, f"rows={list(self.rows)} must be numbers above 0")
        check(self.speculate != "off", "speculate='off' is what drafts are compared with")
        assert self.rollout(self.rows[0], self.speculate)  # which checks the rest

    def rollout(self, rows: int, speculate: str) -> RolloutConfig:
        """An engine that decodes so many sequences at once."""
        return RolloutConfig(
            slots=rows,
            context=self.prompt + self.new_tokens,
            page=64,
            decode_steps=self.decode_steps,
            speculate=speculate,
            drafts=self.drafts,
        )


@command("bench_drafting")
def main(mapping: dict[str, Any]) -> dict[str, Any]:
    cfg = load(BenchConfig, mapping)
    model, console = resolve(cfg.model, cfg.seed), Console(stderr=True)
    found = []
    with Progress(console=console) as bars:
        bar = bars.add_task("compiling", total=None)
        for rows in cfg.rows:
            bars.reset(bar, description=f"{rows} rows", total=2 * (1 + cfg.repeat))
            found.append(asyncio.run(compared(cfg, model, rows, lambda: bars.advance(bar))))
    console.print(table(found))
    return {"rows": found, "model": cfg.model, "speculate": cfg.speculate}


async def compared(cfg: BenchConfig, model: LoadedModel, rows: int, tell: Any) -> dict[str, Any]:
    """The row of one number of sequences."""
    with ExitStack() as stack:
        engines = [
            RolloutEngine(
                model.cfg,
                model.params,
                (),
                cfg.rollout(rows, speculate),
                model.chat.tokenizer,
                stack.enter_context(ThreadPoolExecutor(1, "device")),
            )
            for speculate in ("off", cfg.speculate)
        ]
        async with asyncio.TaskGroup() as group:
            serving = [group.create_task(engine.serve()) for engine in engines]
            runs: list[list[tuple[float, float]]] = [[], []]
            for repeat in range(1 + cfg.repeat):  # the first one compiles what is needed
                for timed, engine in zip(runs, engines, strict=True):
                    timed.append(await played(cfg, engine, rows, model.cfg.vocab, repeat))
                    tell()
            for task in serving:
                task.cancel()
        stats = engines[1].stats()
    return report(rows, runs, stats)


async def played(
    cfg: BenchConfig, engine: RolloutEngine, rows: int, vocab: int, repeat: int
) -> tuple[float, float]:
    """Seconds and CPU-seconds of one run of all sequences."""
    rng = np.random.default_rng((cfg.seed, repeat))

    async def one(choice: int, prompt: np.ndarray) -> None:
        sampling = Sampling(
            temperature=cfg.temperature,
            max_tokens=cfg.new_tokens,
            seed=cfg.seed,
            choice=choice,
            ignore_eos=True,
        )
        async for _ in engine.generate(Request(prompt=prompt, sampling=sampling)):
            pass

    prompts = rng.integers(0, vocab, (rows, cfg.prompt), dtype=np.int32)
    began, cpu = time.monotonic(), time.process_time()
    await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))
    return time.monotonic() - began, time.process_time() - cpu


def report(rows: int, runs: list[list[tuple[float, float]]], stats: Any) -> dict[str, Any]:
    """The numbers of a row: the fastest runs, and what the engine says of its drafts."""
    (off, off_cpu), (on, on_cpu) = (map(min, zip(*timed[1:], strict=True)) for timed in runs)
    calls = {name: n for name, n in stats.items() if name.startswith("calls_of_")}
    total = sum(calls.values())
    depths = {name.removeprefix("calls_of_"): n / total for name, n in sorted(calls.items())}
    drafted = stats["draft_tokens"]
    return {
        "rows": rows,
        "depths": depths,  # of all runs, the share of calls
        "acceptance": stats["accepted_tokens"] / drafted if drafted else None,
        "tokens_per_verify": stats["tokens_per_verify"],
        "speedup": off / on,
        "speedup_cpu": off_cpu / on_cpu,
        "speedup_cpu_mean": sum(c for _, c in runs[0][1:]) / sum(c for _, c in runs[1][1:]),
        "seconds_off": off,
        "seconds_on": on,
        "cpu_seconds_off": off_cpu,
        "cpu_seconds_on": on_cpu,
    }


def table(found: list[dict[str, Any]]) -> Table:
    """The rows for people to read."""
    made = Table(*COLUMNS)
    for row in found:
        depths = " ".join(f"{depth}:{share:.0%}" for depth, share in row["depths"].items())
        shares = ("–" if row[name] is None else f"{row[name]:.2f}" for name in COLUMNS[2:])
        made.add_row(str(row["rows"]), depths, *shares)
    return made


if __name__ == "__main__":
    main()
