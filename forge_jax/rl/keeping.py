"""What a run works with, and what it keeps of every step: rows, totals, checkpoints, pictures.

Steps flow in. The invariant: what can be saved at any moment between two updates is the state
after the last complete one, with the cursors that were taken together with it.
"""

import dataclasses
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from forge_jax.agents.protocol import Agent
from forge_jax.config import TrainConfig
from forge_jax.models.load import LoadedModel
from forge_jax.rl.checkpoint import Checkpoints
from forge_jax.rl.loop import Step
from forge_jax.rl.measure import Totals
from forge_jax.rl.plots import draw_curves, draw_forest
from forge_jax.rl.report import Reporter
from forge_jax.rl.reward_row import alarmed
from forge_jax.rl.state import TrainState
from forge_jax.sched.pool import Pool
from forge_jax.sched.split import forest_of


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run works with, from start to end."""

    cfg: TrainConfig
    model: LoadedModel
    agents: Mapping[str, Agent]  # by task family
    folder: Path
    pool: Pool
    checkpoints: Checkpoints
    reporter: Reporter
    bars: Progress
    device: Executor  # one thread: from here on the engine and the trainer take turns on it
    began: float  # time.monotonic() at the start of this session


class Keeper:
    """Keeps what each step leaves behind: a row, running totals, checkpoints, pictures."""

    def __init__(self, run: Run, step: int, totals: Totals):
        """`totals` are those after `step` updates."""
        self._run = run
        self._earlier = totals.seconds  # of sessions before this one
        self._unsaved: tuple[int, TrainState, Mapping[str, Any]] | None = None
        self.totals = totals
        self._bar = run.bars.add_task(
            f"{run.cfg.title} RL", total=run.cfg.steps, completed=step, shown=""
        )

    def seconds(self) -> float:
        """Wall time of the run so far, over all sessions."""
        return time.monotonic() - self._run.began + self._earlier

    def keep(self, step: Step) -> None:
        """Called on the device thread after every update."""
        run, number = self._run, step.row["step"]
        self.totals = self.totals.add(step.row)
        run.reporter.add(alarmed(run.reporter.rows, step.row))
        run.bars.update(self._bar, completed=number, shown=shown(step.row))
        self._unsaved = (number, step.state, step.cursors)
        if number % run.cfg.checkpoint_every == 0 or number == run.cfg.steps:
            if number == run.cfg.steps or not run.cfg.sched.hold_updates:  # as `stop`
                self.save(number, step.state, step.cursors)
            so_far = {"eval_before": self.totals.eval_before}
            draw_curves(run.folder / "curves.png", run.reporter.rows, so_far)
            if step.batch.trees:
                show = run.model.chat.tokenizer.decode
                forest = forest_of(step.batch.trees[0])
                draw_forest(run.folder / "forest.png", forest, lambda i: show([i]))

    def save(self, step: int, state: TrainState, cursors: Mapping[str, Any]) -> None:
        """Writes a checkpoint; `cursors` are the collector's, taken together with `state`."""
        self.totals = dataclasses.replace(self.totals, seconds=self.seconds())
        host = {"totals": dataclasses.asdict(self.totals), "cursors": cursors}
        self._run.checkpoints.save(step, state, host)
        self._unsaved = None

    def stop(self) -> None:
        """Saves the last complete step, unless it is saved; called on the device thread when no
        update runs. A run whose weights are held back goes on from its start alone."""
        if self._unsaved is not None and not self._run.cfg.sched.hold_updates:
            self.save(*self._unsaved)


def shown(row: Mapping[str, Any]) -> str:
    """A step's row in a few words, for the progress line."""
    words = [
        f"{name} {row[key]:.2f}"
        for name, key in (("reward", "reward"), ("calls", "mean_turns"), ("lag", "lag_mean"))
        if row[key] is not None
    ]
    if not row["stepped"]:
        words.append(f"({row['skipped'] or 'nothing to train on'})")
    return "  ".join(words)
