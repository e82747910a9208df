"""Acceptance of drafts while modules learn online, and after they stop.

    python -m experiments.bench_speculation [task=hop] [seeds=[0,1,2]] [online=16] [after=32]

For every seed the command makes a policy by imitation, gives it fresh prediction modules, and
trains both by RL, synchronously, with an engine that drafts with the modules. After `online`
updates the run is gone on with twice, from one checkpoint: with modules that learn ("trained")
and with modules that stay as they are ("frozen"). Modules do not move the policy and drafts
change no token, so that both branches have the same policy and the same episodes, to the bit:
what differs is what the modules are worth: to the engine, and on one text, that of the last
updates (`fixed_acceptance_k`, see `experiments.fixed_text`). Writes curves.png and rows.json;
the last line of stdout is a JSON object.
"""

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from hydra.core.hydra_config import HydraConfig
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from experiments.command import command
from experiments.fixed_text import acceptance, text_of
from experiments.models import resolve
from forge_jax.config import (
    EvalConfig,
    MtpConfig,
    OptimConfig,
    PackConfig,
    RolloutConfig,
    SchedConfig,
    TrainConfig,
    UserError,
    WarmConfig,
    check,
    load,
)
from forge_jax.rl.checkpoint import Checkpoints
from forge_jax.rl.report import METRICS, read_rows
from forge_jax.rl.run import train
from forge_jax.rl.start import placed, prepared
from forge_jax.rl.state import create, policy_of
from forge_jax.sched.pool import Pool
from forge_jax.sharding import make_mesh

BRANCHES = ("trained", "frozen")
ENDS = 5  # updates that a mean at a start, a branching or an end is of
COLOURS = {"online": "0.3", "trained": "#2a7f62", "frozen": "#c8553d"}
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One benchmark; see `configs/bench_speculation.yaml`."""

    model: str = "quick"
    task: str = "hop"
    seeds: tuple[int, ...] = (0, 1, 2)
    warm: int = 100
    online: int = 16
    after: int = 32
    every: int = 4
    text: int = 4
    modules: int = 2
    weight: float = 1.0
    top_k: int = 16
    learning_rate: float = 2e-3
    group: int = 8
    batch: int = 4
    out: str | None = None

    def __post_init__(self) -> None:
        check(len(self.seeds) > 0, "seeds=[] must name at least one")
        for name in ("warm", "online", "after", "every", "text", "modules"):
            check(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        both = self.online + self.after
        check(self.text <= both, f"text={self.text} must be at most online + after = {both}")
        assert self.reinforced(0, "")  # which checks the rest

    def imitated(self, seed: int) -> TrainConfig:
        """The run that makes a policy and does nothing else."""
        return TrainConfig(
            model=self.model,
            task=self.task,
            seed=seed,
            steps=0,
            warm=WarmConfig(
                steps=self.warm,
                gate=0.0,
                optim=OptimConfig(
                    learning_rate=6e-3, warmup_steps=20, decay_steps=self.warm, clip_norm=0.3
                ),
            ),
            pack=PackConfig(bucket_ratio=4.0),
            eval=EvalConfig(episodes=8),
            rollout=RolloutConfig(deterministic=True),
        )

    def reinforced(self, seed: int, model: str) -> TrainConfig:
        """RL of the policy in a folder, with modules that learn from nothing."""
        return dataclasses.replace(
            self.imitated(seed),
            model=model,
            steps=self.online,
            checkpoint_every=self.every,
            checkpoints_kept=self.online + self.after + 1,
            warm=WarmConfig(steps=0, gate=0.0),
            optim=OptimConfig(
                learning_rate=self.learning_rate, warmup_steps=5, beta2=0.95, clip_norm=0.3
            ),
            rollout=RolloutConfig(
                slots=self.group * self.batch, speculate="mtp", drafts=self.modules
            ),
            sched=SchedConfig(group=self.group, batch=self.batch, window=0, synchronous=True),
            mtp=MtpConfig(depth=self.modules, weight=self.weight, top_k=self.top_k),
            audit_versions=0,
        )


@command("bench_speculation")
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    return run(load(BenchConfig, mapping), Path(HydraConfig.get().runtime.output_dir))


def run(cfg: BenchConfig, folder: Path) -> dict[str, Any]:
    """The command's result. Raises UserError where the folder holds one already."""
    if (folder / "rows.json").exists():
        raise UserError(f"out={folder} holds a benchmark already")
    found = [story(cfg, seed, folder / f"seed{seed}") for seed in cfg.seeds]
    curves = [{name: read_rows(one / METRICS) for name, one in runs.items()} for runs in found]
    fixed = [on_one_text(cfg, seed, runs) for seed, runs in zip(cfg.seeds, found, strict=True)]
    rows = [
        summary(seed, cfg, rows, text) | {"same_policy": same_policy(cfg, seed, runs)}
        for seed, runs, rows, text in zip(cfg.seeds, found, curves, fixed, strict=True)
    ]
    result = {"rows": rows, "mean": means(rows), "run_dir": str(folder)}
    (folder / "rows.json").write_text(json.dumps(result, indent=1) + "\n")
    lines = [
        {name: [*rows[name], *text[name]] for name in BRANCHES}
        for rows, text in zip(curves, fixed, strict=True)
    ]
    draw(folder / "curves.png", cfg, lines)
    return result


def story(cfg: BenchConfig, seed: int, folder: Path) -> dict[str, Path]:
    """The folders of one seed's run and its branches."""
    first, online = folder / "imitated", folder / "online"
    played(cfg.imitated(seed), first)
    played(cfg.reinforced(seed, str(first)), online)
    for branch in BRANCHES:
        shutil.copytree(online, folder / branch)
        played(branch_of(cfg, seed, folder, branch), folder / branch)
    return {branch: folder / branch for branch in BRANCHES}


def branch_of(cfg: BenchConfig, seed: int, folder: Path, branch: str) -> TrainConfig:
    """The configuration that a branch goes on with, from the last checkpoint."""
    base = cfg.reinforced(seed, str(folder / "imitated"))
    mtp = dataclasses.replace(base.mtp, frozen=branch == "frozen")
    return dataclasses.replace(base, steps=cfg.online + cfg.after, mtp=mtp)


def played(cfg: TrainConfig, folder: Path) -> None:
    """A run of `cfg` in a folder, or the rest of it."""
    folder.mkdir(parents=True, exist_ok=True)
    mapping = dataclasses.asdict(cfg)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(mapping)))
    train(cfg, resolve(cfg.model, cfg.seed, mesh=make_mesh()), folder, mapping)


def same_policy(cfg: BenchConfig, seed: int, runs: Mapping[str, Path]) -> bool:
    """Both branches end with the same bits of the policy, after the same tokens."""
    ends, said = [], []
    for branch, folder in runs.items():
        one = branch_of(cfg, seed, folder.parent, branch)
        model = prepared(one, resolve(one.model, one.seed, mesh=make_mesh()))
        fresh = create(placed(one, model, make_mesh())[1], one.optim)
        with closing(Checkpoints(folder / "checkpoints")) as checkpoints:
            state, _ = checkpoints.restore(one.steps, fresh)
        ends.append(jax.tree.leaves(jax.device_get(policy_of(state.params))))
        pool = Pool.open(str(folder / "pool"))
        turns = [t for item in sorted(pool.items()) for e in pool.get(item) for t in e.turns]
        said.append([turn.output.tolist() for turn in turns])
    same = all(np.array_equal(a, b) for a, b in zip(*ends, strict=True))
    return same and said[0] == said[1]


def on_one_text(cfg: BenchConfig, seed: int, runs: Mapping[str, Path]) -> dict[str, Rows]:
    """What both branches' modules are worth on the text of the last updates, by checkpoints."""
    trained, frozen = (branch_of(cfg, seed, runs[b].parent, b) for b in BRANCHES)
    text = text_of(trained, runs["trained"], cfg.text)
    return {
        "trained": acceptance(trained, runs["trained"], text),
        "frozen": acceptance(frozen, runs["frozen"], text, since=cfg.online),
    }


def summary(
    seed: int, cfg: BenchConfig, rows: Mapping[str, Rows], fixed: Mapping[str, Rows]
) -> dict[str, Any]:
    """Means over a few updates at the start, at the branching and at both ends; beside them
    what the checkpoints there are worth on one text, and all of these."""
    before = [row for row in rows["trained"] if row["step"] <= cfg.online]
    parts = {"start": before[:ENDS], "branching": before[-ENDS:]}
    parts |= {branch: list(rows[branch])[-ENDS:] for branch in BRANCHES}
    measures = [f"acceptance_{k + 1}" for k in range(cfg.modules)]
    measures += [f"mtp_accepted_{k + 1}" for k in range(cfg.modules)]
    measures += ["tokens_per_verify", "reward", "entropy"]
    found = {
        part: {name: mean_of(chosen, name) for name in measures} for part, chosen in parts.items()
    }
    ends = {"start": fixed["trained"][0], "branching": fixed["frozen"][0]}
    for part, last in (ends | {branch: fixed[branch][-1] for branch in BRANCHES}).items():
        found[part] |= {name: value for name, value in last.items() if name != "step"}
    return {"seed": seed, **found, "fixed": fixed}


def mean_of(rows: Rows, name: str) -> float | None:
    """Over the rows that have it."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return float(np.mean(values)) if values else None


def means(rows: Rows) -> dict[str, Any]:
    """Over seeds, and the least and the most."""
    found: dict[str, Any] = {}
    for part in ("start", "branching", *BRANCHES):
        for name in rows[0][part]:
            values = [row[part][name] for row in rows if row[part][name] is not None]
            if values:
                spread = [float(np.mean(values)), min(values), max(values)]
                found.setdefault(part, {})[name] = spread
    return found


def draw(path: Path, cfg: BenchConfig, curves: Sequence[Mapping[str, Rows]]) -> None:
    """Acceptance of every module by the engine, by the policy on its own text and on one text;
    tokens of a verify, and what the policy did meanwhile."""
    modules = [k + 1 for k in range(cfg.modules)]
    panels = [f"{name}_{k}" for name in ("mtp_accepted", "fixed_acceptance") for k in modules]
    panels += ["acceptance_1", "tokens_per_verify", "reward", "entropy"]
    across = len(panels) // 2
    figure = Figure(figsize=(3.2 * across, 5.6), layout="constrained")
    for axis, name in zip(figure.subplots(2, across).flat, panels, strict=True):
        for label, rows in parts_of(cfg, curves).items():
            band(axis, label, [{r["step"]: r[name] for r in one if name in r} for one in rows])
        axis.axvline(cfg.online, color="0.6", linewidth=0.8, linestyle=":")
        axis.set_title(name.replace("_", " "), fontsize=10)
        axis.set_xlabel("update", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
    axis.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=120)


def parts_of(cfg: BenchConfig, curves: Sequence[Mapping[str, Rows]]) -> dict[str, list[Rows]]:
    """The rows of every seed by what the modules did in them."""
    parts: dict[str, list[Rows]] = {
        "online": [[r for r in one["trained"] if r["step"] <= cfg.online] for one in curves]
    }
    for branch in BRANCHES:
        parts[branch] = [[r for r in one[branch] if r["step"] >= cfg.online] for one in curves]
    return parts


def band(axis: Any, label: str, lines: Sequence[Mapping[int, float | None]]) -> None:
    """The mean of lines over the steps of which all know a value, and the area between them."""
    steps = [step for step in lines[0] if all(line.get(step) is not None for line in lines)]
    values = np.array([[line[step] for step in steps] for line in lines], float)
    axis.plot(steps, values.mean(axis=0), label=label, color=COLOURS[label], linewidth=1.5)
    least, most = values.min(axis=0), values.max(axis=0)
    axis.fill_between(steps, least, most, color=COLOURS[label], alpha=0.15, linewidth=0)


if __name__ == "__main__":
    main()
