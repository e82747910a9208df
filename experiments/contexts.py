"""Policies trained under one context manager, used under others: success, and how far they drift.

    python -m experiments.contexts runs=[multirun/context_warm,multirun/context] [plot=FILE.png]

Takes runs of `+experiment=context` that have ended. Each plays held-out trails under every
scaffold, a context manager or a program (`configs/scaffold/`), and at every level; and the drift of
its next tokens from whole contexts is measured (`experiments.context_drift`). Every cell is written
to OUT/rows.json as soon as it is played, and the same call goes on with those that are missing.
Prints tables and {"rows", "drifts", "out", "plot"}; docs/results.md reads them.
"""

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.command import command
from experiments.comparing import Run, read_runs
from experiments.context_drift import drift, pairs
from experiments.context_report import draw, tables
from experiments.models import resolve
from experiments.runs import run_config
from experiments.simulate import check_plot
from forge_jax.agents.families import agent_of
from forge_jax.agents.tasks import trail
from forge_jax.config import (
    ContextConfig,
    EvalConfig,
    ProgramConfig,
    RolloutConfig,
    UserError,
    check,
    load,
)
from forge_jax.models.load import LoadedModel
from forge_jax.rl.evaluate import bootstrap, held_out, is_solved, kept_of, played, summarise
from forge_jax.rl.play import Player
from forge_jax.rl.serving import serving
from forge_jax.types import Episode, Task

FAMILY = "trail"
BASE = "base"  # runs without an update


@dataclass(frozen=True, kw_only=True)
class Scaffold:
    """What stands between a task and a policy."""

    context: ContextConfig | None = None  # of the family's own agent
    agent: ProgramConfig | None = None  # in its place


@dataclass(frozen=True, kw_only=True)
class Config:
    """One comparison; see `configs/contexts.yaml`."""

    runs: tuple[str, ...]
    scaffolds: Mapping[str, Scaffold]
    managed: str
    levels: tuple[int, ...]
    episodes: int
    seed: int
    out: str
    plot: str | None
    concurrency: int
    episode_seconds: float
    rollout: RolloutConfig

    def __post_init__(self) -> None:
        EvalConfig(episodes=self.episodes, concurrency=self.concurrency, seed=self.seed)
        known = self.scaffolds.get(self.managed)
        check(
            known is not None and known.context is not None,
            f"managed={self.managed!r} must be one of scaffolds that has a context",
        )
        last = len(trail.LEVELS) - 1
        once = 0 < len(self.levels) == len(set(self.levels))
        fine = once and all(0 <= level <= last for level in self.levels)
        check(fine, f"levels={list(self.levels)} must be from 0 to {last}, at least one, each once")
        check(bool(self.runs), "runs=[] must name at least one folder")
        check(self.episode_seconds > 0, f"episode_seconds={self.episode_seconds} must be > 0")

    @property
    def played(self) -> dict[str, Any]:
        """What a cell depends on beside its run, scaffold and level."""
        keys = ("scaffolds", "managed", "episodes", "seed", "rollout")
        return {key: asdict(self)[key] for key in keys}


Cell = tuple[str, str, int]  # run, scaffold, level
Row = dict[str, Any]


@command("contexts")
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    cfg = load(Config, mapping)
    plot = check_plot(cfg.plot)
    runs = read_runs(cfg.runs, partial=False)
    known = {str(run.folder): known_of(run, cfg.scaffolds) for run in runs}
    book = Book(Path(cfg.out), cfg.played)
    for told in known.values():
        book.check(told)
    for folder, told in known.items():
        measure(folder, told, cfg, book)
    rows, drifts = book.of([*known], cfg.levels)
    print(tables(rows, drifts), file=sys.stderr)
    if plot is not None:
        draw(plot, rows, drifts, cfg.managed)
    return {"rows": rows, "drifts": drifts, "out": cfg.out, "plot": cfg.plot}


def known_of(run: Run, scaffolds: Mapping[str, Scaffold]) -> Row:
    """What the rows of a run have in common: "own" is the scaffold that it was trained under, None
    of one without updates, "trained" names that and the number of updates.

    Raises UserError where it is none of them, or the run is of another task.
    """
    cfg = run_config(run.folder)
    if cfg.task != FAMILY:
        raise UserError(f"runs={run.folder}: its task={cfg.task}, not {FAMILY}")
    told = {"run": str(run.folder), "seed": cfg.seed}
    if cfg.steps == 0:
        return told | {"own": None, "trained": BASE}
    own = Scaffold(context=cfg.context, agent=cfg.agent)
    for name, scaffold in scaffolds.items():
        if scaffold == own:
            return told | {"own": name, "trained": f"{name}, {cfg.steps} updates"}
    raise UserError(f"runs={run.folder}: its {own} is none of {[*scaffolds]}")


class Book:
    """The cells that are there, in a file that is whole at any moment."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]):
        self._path = folder / "rows.json"
        self._settings = json.loads(json.dumps(settings))
        self._cells: list[Row] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"out={folder}: {error.strerror}") from error
        if self._path.is_file():
            told = json.loads(self._path.read_text())
            differing = [k for k, v in self._settings.items() if told["settings"].get(k) != v]
            if differing:
                raise UserError(f"out={folder} was made with other {', '.join(differing)}")
            self._cells = told["cells"]

    def add(self, cell: Row) -> None:
        self._cells.append(cell)
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps({"settings": self._settings, "cells": self._cells}, indent=1))
        fresh.replace(self._path)

    def check(self, told: Row) -> None:
        """Raises UserError where the cells of a run are of another that was in its folder."""
        for cell in self._cells:
            if cell["run"] == told["run"] and (was := {key: cell[key] for key in told}) != told:
                raise UserError(f"{self._path} has cells of another run of that folder: {was}")

    def missing(self, run: str, cfg: Config) -> Iterator[tuple[str | None, int]]:
        """Scaffolds and levels that `run` has no cell of; None in place of a scaffold: a drift."""
        there = {(c["run"], c.get("scaffold"), c["level"]) for c in self._cells}
        for level in cfg.levels:
            for scaffold in (*cfg.scaffolds, None):
                if (run, scaffold, level) not in there:
                    yield scaffold, level

    def of(self, runs: Sequence[str], levels: Sequence[int]) -> tuple[list[Row], list[Row]]:
        """Cells of play and of drift of these runs and levels."""
        own = [c for c in self._cells if c["run"] in runs and c["level"] in levels]
        return [c for c in own if "scaffold" in c], [c for c in own if "scaffold" not in c]


def measure(folder: str, told: Row, cfg: Config, book: Book) -> None:
    """Plays and measures what is missing of a run."""
    todo = list(book.missing(folder, cfg))
    if not todo:
        return
    model = resolve(folder)
    for level in [level for scaffold, level in todo if scaffold is None]:
        book.add(told | {"level": level} | drifted(model, level, cfg))
    asyncio.run(play(model, [(s, level) for s, level in todo if s is not None], told, cfg, book))


def drifted(model: LoadedModel, level: int, cfg: Config) -> Row:
    """Of a model's next tokens, over the tokens of all replies: the mean of their divergence in
    nats, with its interval, and the share of those whose likeliest is another one."""
    context = cfg.scaffolds[cfg.managed].context
    assert context is not None
    found = pairs(held_out(FAMILY, cfg.episodes, cfg.seed, level), context, model.chat)
    kl, moved = drift(model, found)
    return {
        "kl": float(kl.mean()),
        "kl_ci": bootstrap(kl),
        "moved": float(moved.mean()),
        "tokens": len(kl),
    }


async def play(
    model: LoadedModel, todo: Sequence[tuple[str, int]], told: Row, cfg: Config, book: Book
) -> None:
    """Plays scaffold after scaffold against one server."""
    with ThreadPoolExecutor(1, "device") as device:
        async with serving(model, model.params, 0, cfg.rollout, device) as up:
            for name, level in todo:
                scaffold = cfg.scaffolds[name]
                player = Player(
                    agent=agent_of(FAMILY, scaffold.agent, None, scaffold.context),
                    gateway=up.gateway,
                    url=up.url,
                    client=up.client,
                    model=model.name,
                    purpose="eval",
                    seed=cfg.seed,
                    temperature=1.0,
                    seconds=cfg.episode_seconds,
                )
                tasks = held_out(FAMILY, cfg.episodes, cfg.seed, level)
                episodes = await played(tasks, partial(one, player), cfg.concurrency)
                row = told | {"scaffold": name, "level": level} | row_of(episodes)
                print(f"{told['run']} {name} {level}: {row['success']:.3f}", file=sys.stderr)
                book.add(row)


async def one(player: Player, number: int, task: Task) -> Episode:
    """The only episode of a held-out task."""
    return await player.episode(number, 0, task)


def row_of(episodes: Sequence[Episode]) -> Row:
    """Success, and by lookups [solved, episodes] of each number of them."""
    kept = kept_of(episodes)
    by: dict[int, list[int]] = {}
    for episode in kept:
        counted = by.setdefault(trail.lookups_of(episode.task), [0, 0])
        counted[0] += is_solved(episode)
        counted[1] += 1
    whole = summarise(episodes)
    return {
        "success": whole.success,
        "success_ci": whole.success_ci,
        "turns": whole.mean_turns,
        "failures": whole.failures,
        "by_lookups": {str(n): by[n] for n in sorted(by)},
    }


if __name__ == "__main__":
    main()
