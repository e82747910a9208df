"""Faults of a training run, by real means: signals, damaged files, held locks.

A seed flows in, faults to do one after another flow out; doing one acts on the run's process and
folder from outside, as a machine would. The invariant: what is done depends on the seed and on the
run's progress alone.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forge_jax.rl.report import METRICS
from forge_jax.sched.locks import locked

ENDS = {"kill": signal.SIGKILL, "preempt": signal.SIGTERM}  # of the process; the run goes on later
KINDS = (*ENDS, "stop", "slow")
LOCKS = 64  # of the writers of a pool's folder
LOOK_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: `delay` seconds after the row of `step`."""

    kind: str
    step: int
    delay: float
    damage: tuple[float, ...]  # of which stored objects, as shares of those there are


def drawn(counts: Mapping[str, int], steps: int, damage: int, seed: int) -> list[Fault]:
    """So many faults of each kind, in order of the steps that they follow; each that ends the
    process finds `damage` objects of the pool damaged when the run goes on."""
    rng = np.random.default_rng(seed)
    kinds = rng.permutation([kind for kind, count in counts.items() for _ in range(count)])
    after = sorted(int(step) for step in rng.integers(1, steps, size=len(kinds)))
    return [
        Fault(
            kind=str(kind),
            step=step,
            delay=float(rng.random()),
            damage=tuple(rng.random(damage if kind in ENDS else 0).tolist()),
        )
        for kind, step in zip(kinds, after, strict=True)
    ]


class Training:
    """The training command in a process of its own, which says how it goes on in `folder`."""

    def __init__(self, folder: Path, overrides: Sequence[str]):
        goes_on = (folder / "config.yaml").exists()
        call = [f"resume={folder}"] if goes_on else [f"hydra.run.dir={folder}", *overrides]
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.begun = saved(folder)  # the step that it goes on from
        self._folder, self._since = folder, time.time_ns()
        self.log = folder.parent / f"{folder.name}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "experiments.train", *call], stdout=log, stderr=log
            )

    def reported(self) -> int:
        """Step of its newest row, those aside that it will lose to its checkpoint."""
        path = self._folder / METRICS
        fresh = path.exists() and path.stat().st_mtime_ns > self._since
        return len(rows(self._folder)) if fresh else self.begun

    def end(self, number: int = signal.SIGKILL) -> int:
        """Its exit status, minus a signal's number, after `number` was sent."""
        self.process.send_signal(number)
        return self.process.wait()

    def until(self, event: Callable[[], bool]) -> bool:
        """Waits for `event`; False where the run ended before."""
        while not event():
            if self.process.poll() is not None:
                return event()
            time.sleep(LOOK_SECONDS)
        return True

    def reach(self, step: int) -> bool:
        """Waits for its row of `step`; False where it ended before."""
        return self.until(lambda: self.reported() >= step)

    def finish(self) -> None:
        """Waits for its end. Raises RuntimeError, with its last words, where it failed."""
        if self.process.wait() != 0:
            last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"the run ended with {self.process.returncode}: {last}")


def rows(folder: Path) -> list[dict[str, Any]]:
    """The whole rows that a run has reported so far."""
    path = folder / METRICS
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def done(fault: Fault, run: Training, folder: Path, seconds: float) -> dict[str, Any]:
    """Does a fault whose time has come, for `seconds` where it lasts; what it did."""
    told: dict[str, Any] = {"kind": fault.kind}
    if fault.kind in ENDS:
        told |= {"status": run.end(ENDS[fault.kind]), "saved": saved(folder)}
        told["damaged"] = damaged(folder / "pool" / "items", fault.damage)
    elif fault.kind == "stop":
        run.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        run.process.send_signal(signal.SIGCONT)
    else:  # a store that takes nothing for a while
        with ExitStack() as held:
            for number in range(LOCKS):
                held.enter_context(locked(folder / "pool", f"{number:02d}"))
            time.sleep(seconds)
    return told | {"step": len(rows(folder))}


def saved(folder: Path) -> int:
    """Step of a run's newest checkpoint; 0 without any."""
    steps = [int(p.name) for p in (folder / "checkpoints").glob("*") if p.name.isdigit()]
    return max(steps, default=0)


def damaged(items: Path, shares: Sequence[float]) -> list[int]:
    """Damages objects, cut short or a byte changed by turns; their items."""
    found = sorted(path for path in items.iterdir() if path.name.isdecimal())
    chosen = dict.fromkeys(found[int(share * len(found))] for share in shares)
    for turn, path in enumerate(chosen):
        data = bytearray(path.read_bytes())
        middle = len(data) // 2
        data[middle] = (data[middle] + 1) % 256  # of one damaged before, too
        path.write_bytes(data[:middle] if turn % 2 else data)
    return [int(path.name) for path in chosen]


def below(pid: int) -> set[int]:
    """All processes that `pid` started, directly or not."""
    found: set[int] = set()
    try:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, task.read_text().split()):
                found |= {child} | below(child)
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        pass
    return found


def running(pid: int, word: str) -> list[int]:
    """Processes below `pid` with `word` among their arguments."""
    found = []
    for child in sorted(below(pid)):
        try:
            arguments = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if word.encode() in arguments:
            found.append(child)
    return found


def signalled(run: Training, word: str, number: int) -> bool:
    """Sends a signal to the first process of the run with that argument; False if none ran."""
    sent: list[int] = []

    def send() -> bool:
        for pid in running(run.process.pid, word)[:1]:
            os.kill(pid, number)
            sent.append(pid)
        return bool(sent)

    run.until(send)
    return bool(sent)
