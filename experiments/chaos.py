"""The default run under random faults: it ends as a calm one does, and every fault is counted.

    python -m experiments.chaos [seed=0] [steps=8] [kills=2] [preempts=1] [stops=1] [slows=1]

Two synchronous runs: one calm, one killed, preempted, stopped, slowed and resumed with damaged
objects in its pool; then an asynchronous one whose agents are programs of which one is killed and
one, at the head of the queue, hangs for ever. The last line is one JSON object; what is different
where it must not be ends the command with status 1. An interrupted one goes on with resume=FOLDER.
"""

import json
import signal
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from hydra.core.hydra_config import HydraConfig
from rich.console import Console

from experiments.chaos_faults import ENDS, Training, done, drawn, rows, signalled
from experiments.command import command
from experiments.models import resolve
from forge_jax.config import check, load
from forge_jax.rl.report import progress
from forge_jax.sched.codec import CorruptObject
from forge_jax.sched.pool import Pool

AGENT = str(Path(__file__).parent / "chaos_agent.py")
SYNCHRONOUS = ("sched.synchronous=true", "sched.window=0")
# What may differ between two runs of one history.
TIMES = ("seconds", "loop_blocked", "pool_retries", "engine_restarts", "gateway_restarts")


@dataclass(frozen=True, kw_only=True)
class ChaosConfig:
    """See `configs/chaos.yaml`."""

    seed: int
    steps: int
    kills: int
    preempts: int
    stops: int
    slows: int
    damage: int
    seconds: float
    head_seconds: float
    settings: tuple[str, ...]
    resume: str | None

    def __post_init__(self) -> None:
        check(self.seed >= 0, f"seed={self.seed} must be >= 0")
        check(self.steps >= 3, f"steps={self.steps} must be at least 3")
        for name in ("kills", "preempts", "stops", "slows", "damage"):
            check(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must be >= 0")
        for name in ("seconds", "head_seconds"):
            check(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be > 0")

    @property
    def counts(self) -> dict[str, int]:
        """How many faults of each kind there are."""
        return {
            "kill": self.kills, "preempt": self.preempts, "stop": self.stops, "slow": self.slows,
        }  # fmt: skip


@command("chaos")
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    cfg = load(ChaosConfig, mapping)
    folder = Path(HydraConfig.get().runtime.output_dir)
    calm, chaos, hung = (folder / name for name in ("calm", "chaos", "hung"))
    print(f"resume={folder}", file=sys.stderr)
    with progress(Console(stderr=True)) as bars:
        bar = bars.add_task("chaos", total=sum(cfg.counts.values()) + 3, shown="a calm run")

        def told(text: str) -> None:
            bars.update(bar, advance=1, shown=text)

        once(calm, (f"steps={cfg.steps}", *cfg.settings, *SYNCHRONOUS))
        told("a run under faults")
        faults = disturbed(cfg, chaos, told)
        told("a run whose head hangs")
        deadline = headed(cfg, hung)
        told("done")
    found = compared(calm, chaos, faults)
    if found["different"]:
        raise RuntimeError(f"seed={cfg.seed}: another result than that of the calm run: {found}")
    if not deadline["expired"]:
        raise RuntimeError(f"seed={cfg.seed}: no head expired behind a stopped agent: {deadline}")
    return {"seed": cfg.seed, "steps": cfg.steps, **found, "hung": deadline, "folder": str(folder)}


def once(folder: Path, overrides: tuple[str, ...]) -> None:
    """A whole run in `folder`, or the rest of it."""
    if not (folder / "summary.json").exists():
        run = Training(folder, overrides)
        try:
            run.finish()
        finally:
            run.end()


def disturbed(cfg: ChaosConfig, folder: Path, told: Callable[[str], None]) -> list[dict[str, Any]]:
    """The run in `folder` under the faults of the seed; what each of them did."""
    overrides = (f"steps={cfg.steps}", *cfg.settings, *SYNCHRONOUS)
    log = folder.parent / "faults.jsonl"
    before = log.read_text().splitlines() if log.exists() else []
    if (folder / "summary.json").exists():
        return [json.loads(line) for line in before]
    run = Training(folder, overrides)
    try:
        for fault in drawn(cfg.counts, cfg.steps, cfg.damage, cfg.seed)[len(before) :]:
            # One that goes on is met while it trains, not while it starts.
            come = run.reach(min(max(fault.step, run.begun + 1), cfg.steps))
            assert come, f"the run ended before {fault}: {run.log}"
            with suppress(subprocess.TimeoutExpired):
                run.process.wait(fault.delay)
            entry = done(fault, run, folder, cfg.seconds)
            with log.open("a") as file:
                file.write(json.dumps(asdict(fault) | entry) + "\n")
            told(f"{entry}")
            if fault.kind in ENDS:
                run = Training(folder, overrides)
        run.finish()
    finally:
        run.end()
    return [json.loads(line) for line in log.read_text().splitlines()]


def headed(cfg: ChaosConfig, folder: Path) -> dict[str, Any]:
    """An asynchronous run of programs, one killed, one stopped for ever; what that cost.

    `cost_seconds`: what the step that waited longest did, over the median of all.
    """
    program = json.dumps([sys.executable, AGENT])
    overrides = (
        *(f"steps={cfg.steps}", *cfg.settings, "sched.in_flight=4", "sched.window=2"),
        *(f"sched.head_seconds={cfg.head_seconds}", "sched.episode_seconds=600"),
        *("agent=base", f"agent.command={program}", "agent.stdin='{prompt}'"),
        "agent.sandbox.kind=none",
    )
    if not (folder / "summary.json").exists():
        run = Training(folder, overrides)
        try:
            for step, number in ((1, signal.SIGKILL), (2, signal.SIGSTOP)):
                assert run.reach(step), f"the run ended before step {step}: {run.log}"
                assert signalled(run, AGENT, number), f"no agent ran: {run.log}"
            run.finish()
        finally:
            run.end()
    history = rows(folder)
    failed: Counter[str] = Counter()
    for row in history:
        failed.update(row["failed"])
    waits = [row["seconds_collect"] for row in history]
    return {
        "deadline_seconds": cfg.head_seconds,
        "cost_seconds": max(waits) - statistics.median(waits),
        "expired": history[-1]["items_expired"],
        "failed": failed,
        "updates": len(history),
    }


def compared(calm: Path, chaos: Path, faults: list[dict[str, Any]]) -> dict[str, Any]:
    """What differs between the two runs, and how each fault was counted."""
    pools = [Pool.open(str(folder / "pool")) for folder in (calm, chaos)]
    quarantined = pools[1].corrupt()
    unread = set(pools[0].items()) - {n for n in pools[0].items() if tokens(pools[1], n)}
    weights = [jax.tree.leaves(resolve(str(folder)).params) for folder in (calm, chaos)]
    histories = [rows(folder) for folder in (calm, chaos)]
    items = [[number for row in history for number in row["items"]] for history in histories]
    same = {
        "items": sorted(items[0]) == sorted(items[1]),
        "rows": [timeless(row) for row in histories[0]] == [timeless(row) for row in histories[1]],
        "tokens": all(
            tokens(pools[0], n) == tokens(pools[1], n) for n in items[0] if n not in unread
        ),
        "weights": all(np.array_equal(a, b) for a, b in zip(*weights, strict=True)),
        "preempted": all(f["saved"] >= f["step"] for f in faults if f["kind"] == "preempt"),
    }
    hurt = {number for fault in faults for number in fault.get("damaged", ())}
    log = (chaos.parent / "chaos.log").read_text(errors="replace")
    return {
        "different": [name for name, alike in same.items() if not alike],
        "items": len(items[0]),
        "updates": len(histories[0]),
        "faults": Counter(fault["kind"] for fault in faults),
        "damaged": len(hurt),
        "quarantined": len(quarantined),
        "damaged_unread": len(unread),
        "stalls_told": log.count("nothing ran for") + log.count("the event loop has been blocked"),
        "interrupts_told": log.count("to go on: "),
    }


def tokens(pool: Pool, number: int) -> list[list[int]]:
    """All that the model sampled in an item; nothing where its object is damaged or gone."""
    try:
        return [turn.output.tolist() for e in pool.get(number) for turn in e.turns]
    except (KeyError, CorruptObject):
        return []


def timeless(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without what depends on when things happened."""
    return {k: v for k, v in row.items() if not any(part in k for part in TIMES)}


if __name__ == "__main__":
    main()
