"""Measurements in which processes take turns, one computing at a time.

A workload goes in; its row comes out. Every process is ready, compiled and warm, before the
first is timed.
"""

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.bench.children import Child
from experiments.bench.config import BenchConfig
from experiments.bench.flops import Work, update_flops, work
from experiments.bench.machine import load_average
from experiments.bench.peers import compared
from experiments.bench.report import MODES, agree, make_row
from experiments.bench.worker import update_job
from experiments.workloads import straight, write
from forge_jax.models.config import ModelConfig
from forge_jax.sched.merge import merge
from forge_jax.sched.workload import read_workload
from forge_jax.types import Sample


@dataclass(frozen=True, kw_only=True, eq=False)
class Bench:
    """What the measurements of one run share."""

    cfg: BenchConfig
    model: ModelConfig
    folder: Path  # logs, and files made for the run
    products: Child  # multiplies matrices, to tell the machine's rate
    tell: Callable[[str], None]  # progress

    @property
    def exported(self) -> Path:
        """The Hugging Face folder that a peer may ask for."""
        return self.folder / "model"

    def rate(self) -> float:
        """FLOPs a second of a large matrix product, now."""
        return self.products.ask()["flops_per_second"]

    def child(self, name: str, file: Path, mode: str) -> Child:
        """The process of a mode."""
        job = update_job(self.cfg.replay(str(file), mode))
        return Child(f"{mode} on {name}", job, self.folder / f"{name}-{mode}.log")


def measure_workload(
    bench: Bench, name: str, file: Path, samples: Sequence[Sample]
) -> dict[str, Any]:
    """The row of a workload. Raises RuntimeError where the modes disagree."""
    works = {mode: work(merge(samples, mode)) for mode in MODES}
    load = [load_average()]
    with ExitStack() as stack:
        children: dict[str, Child] = {}
        answers: dict[str, list[dict[str, Any]]] = {}
        for mode in MODES:
            bench.tell(f"{name}: compiling {mode}")
            children[mode] = stack.enter_context(bench.child(name, file, mode))
            answers[mode] = [children[mode].ask()]
        agree(name, answers)
        rates, printed = _take_turns(bench, name, file, works, children, answers)
    row = make_row(name, works, bench.model, answers, statistics.median(rates))
    row["peers"] = {
        peer: compared(found, row, row["seconds"]["tree"]) for peer, found in printed.items()
    }
    return row | {"samples": len(samples), "load_average": [*load, load_average()]}


def _take_turns(
    bench: Bench,
    name: str,
    file: Path,
    works: dict[str, Work],
    children: dict[str, Child],
    answers: dict[str, list[dict[str, Any]]],
) -> tuple[list[float], dict[str, list[dict[str, Any]]]]:
    """Adds the timed updates to `answers`; gives the machine's rates between them, and what the
    peers print."""
    cfg = bench.cfg
    rates: list[float] = []
    printed: dict[str, list[dict[str, Any]]] = {peer: [] for peer in cfg.peers}
    times = {mode: cfg.times(works[mode] != works["none"]) for mode in MODES}
    for turn in range(cfg.steps):
        for mode in (mode for mode in MODES if turn < times[mode]):
            bench.tell(f"{name}: step {turn + 1} of {times[mode]}, {mode}")
            answers[mode].append(children[mode].ask())
            rates.append(bench.rate())
        for peer in cfg.programs() if turn < cfg.peer_steps else ():
            bench.tell(f"{name}: peer {peer.name}")
            log = bench.folder / f"{name}-peer-{peer.name}.log"
            printed[peer.name].append(peer.run(file, bench.exported, log))
    return rates, printed


def measure_context(bench: Bench, length: int) -> dict[str, Any]:
    """What an update costs whose samples have `length` tokens and share nothing.

    As many samples as the longest of the sweep has tokens for, so that all updates are of about
    one size.
    """
    name, cfg = f"context_{length}", bench.cfg
    file = bench.folder / f"{name}.npz"
    write(file, straight(length, max(1, max(cfg.contexts) // length)), bench.model.vocab, cfg.seed)
    done = work(merge(read_workload(str(file), bench.model.vocab), "tree"))
    with bench.child(name, file, "tree") as child:
        bench.tell(f"{name}: compiling")
        child.ask()
        steps, rates = [], []
        for step in range(cfg.steps):
            bench.tell(f"{name}: step {step + 1} of {cfg.steps}")
            steps.append(child.ask())
            rates.append(bench.rate())
    flops, rate = update_flops(bench.model, done), statistics.median(rates)
    return {
        "context": length,
        "tokens": done.tokens,
        "pairs": done.pairs,
        "flops": flops,
        "seconds": statistics.median(step["seconds"] for step in steps),
        "gemm_seconds": flops / rate,
        "peak_rss_bytes": steps[-1]["peak_rss_bytes"],
    }
