"""Runs a captured batch through one update, and says what it cost.

    python -m experiments.replay workload=FILE.npz model=NAME_OR_DIR [merge=tree|chain|none]
        [steps=3] [ratio_cap=5] [dtype=float32] [attention=auto] [dump=FILE.npz] [export=DIR]
        [mesh=host] [mesh.fsdp=2] [mesh.context=4]

A workload and a model go in; loss, gradient norm and timings come out, the same loss and
gradient whatever the merge and the mesh. Loss, `dump` and `export` are of the weights before
any update.
"""

import resource
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress

from experiments.command import command
from experiments.models import resolve
from forge_jax.attention.tree import IMPLEMENTATIONS
from forge_jax.attention.tree import resolve as implementation_of
from forge_jax.config import (
    REMAT,
    HostsConfig,
    LossConfig,
    MeshConfig,
    OptimConfig,
    PackConfig,
    UserError,
    check,
    load,
)
from forge_jax.models.config import ModelConfig
from forge_jax.models.hf import export_folder, flat_names
from forge_jax.models.load import LoadedModel
from forge_jax.objective import RATIO_CAP, check_cap
from forge_jax.rl.averages import averaged
from forge_jax.rl.forward import tiled
from forge_jax.rl.losses import LOSSES
from forge_jax.rl.parallel import gather, update
from forge_jax.rl.state import TrainState, create
from forge_jax.rl.step import (
    Gathered,
    StepConfig,
    Updated,
    apply,
    computed_tokens,
    executed_area,
    norms,
    scatter,
)
from forge_jax.sched.merge import MODES, unique_tokens
from forge_jax.sched.pack import attention_area, micro_batches
from forge_jax.sched.split import forest_of
from forge_jax.sched.workload import read_workload
from forge_jax.sharding import join, mesh_from
from forge_jax.types import MicroBatch, Sample

DTYPES = ("float32", "float64", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """One replay; see `configs/replay.yaml`."""

    workload: str
    model: str
    merge: str = "tree"
    steps: int = 3
    ratio_cap: float = RATIO_CAP
    dtype: str = "float32"
    attention: str = "auto"
    remat: str = "none"
    dump: str | None = None
    export: str | None = None
    seed: int = 0
    loss: LossConfig = field(default_factory=LossConfig)
    pack: PackConfig = field(default_factory=PackConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    hosts: HostsConfig = field(default_factory=HostsConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        for name, known in (
            ("merge", MODES),
            ("dtype", DTYPES),
            ("attention", IMPLEMENTATIONS),
            ("remat", REMAT),
        ):
            value = getattr(self, name)
            check(value in known, f"{name}={value!r} must be one of {', '.join(known)}")
        check(self.steps >= 1, f"steps={self.steps} must be at least 1")
        check_cap(self.loss, self.ratio_cap)
        check(
            self.loss.reference is None,
            f"loss.reference={self.loss.reference}: a replay goes on with no run that has started",
        )
        check(
            self.loss.per in ("token", "sample"),
            f"loss.per={self.loss.per}: a workload names no episodes",
        )


@command("replay")
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    join(load(ReplayConfig, mapping).hosts)
    cfg = load_replay(mapping)
    with jax.enable_x64(cfg.dtype == "float64"):
        return replay(cfg)


def load_replay(mapping: Mapping[str, Any]) -> ReplayConfig:
    """A replay whose tile suits its device, unless it says another. Raises UserError."""
    cfg = load(ReplayConfig, mapping)
    return replace(cfg, pack=tiled(cfg.pack, cfg.attention, cfg.dtype))


def replay(cfg: ReplayConfig) -> dict[str, Any]:
    """The command's result. Raises UserError for a bad model or workload."""
    console = Console(stderr=True)
    model, samples = read(cfg, console)
    step_cfg = step_config(cfg, model.cfg)
    with Progress(console=console) as bars:
        bar = bars.add_task("compiling and warming up", total=cfg.steps + 1)
        began = time.perf_counter()
        trees = planned_batch(samples, cfg)
        planned = time.perf_counter() - began
        tokens = sum(len(sample.tokens) for sample in samples)
        console.print(f"planned {tokens:,} tokens in {planned:.2f} s")
        state = create(model.params, cfg.optim)
        found = gather(state.params, trees, step_cfg)
        warm = time.perf_counter() - began
        write(cfg, model, found, samples)
        began = time.perf_counter()
        norm, _ = norms(found.grads)
        state = jax.block_until_ready(apply(state, found.grads, cfg.optim))
        warm += time.perf_counter() - began
        seconds = []
        for step in range(cfg.steps):
            bars.update(bar, advance=1, description=f"step {step + 1} of {cfg.steps}")
            state, _, elapsed = timed_update(state, samples, cfg, step_cfg)
            seconds.append(elapsed)
        bars.update(bar, advance=1)
    typical = statistics.median(seconds)
    return {
        "loss": found.loss,
        "grad_norm": float(norm),
        **counts(samples, trees, step_cfg),
        "plan_seconds": planned,
        "compile_seconds": max(0.0, warm - typical),
        "seconds_per_step": typical,
        "tokens_per_second": tokens / typical,
        "peak_rss_bytes": peak_rss(),
        "merge": cfg.merge,
        "attention": implementation_of(cfg.attention, cfg.dtype),
        "device": jax.devices()[0].device_kind,
    }


def step_config(cfg: ReplayConfig, model: ModelConfig) -> StepConfig:
    """What the update of a replay compiles."""
    return StepConfig(
        model=model,
        optim=cfg.optim,
        loss=LOSSES[cfg.loss.kind],
        objective=cfg.loss,
        ratio_cap=cfg.ratio_cap,
        tile=cfg.pack.side,
        attention=cfg.attention,
        remat=cfg.remat,
        dtype=cfg.dtype,
    )


def read(cfg: ReplayConfig, console: Console) -> tuple[LoadedModel, list[Sample]]:
    """Model and samples, once it is sure that both and the outputs are usable."""
    for name in ("dump", "export"):
        target = getattr(cfg, name)
        if target is not None and not Path(target).absolute().parent.is_dir():
            raise UserError(f"{name}={target}: no such folder to write it in")
    if cfg.dump is not None and Path(cfg.dump).is_dir():
        raise UserError(f"dump={cfg.dump} is a folder")
    wide = jnp.float64 if cfg.dtype == "float64" else jnp.float32
    model = resolve(cfg.model, cfg.seed, wide, mesh_from(cfg.mesh))
    samples = read_workload(cfg.workload, model.cfg.vocab)
    if not any(sample.mask.any() for sample in samples):
        raise UserError(f"workload={cfg.workload} has no trained token")
    longest = max(len(sample.tokens) for sample in samples)
    if longest > model.cfg.max_context:
        console.print(f"warning: {longest=} tokens, the model is made for {model.cfg.max_context}")
    return model, samples


def write(
    cfg: ReplayConfig, model: LoadedModel, found: Gathered, samples: Sequence[Sample]
) -> None:
    """Writes the files asked for; the weights are those before any update."""
    if cfg.export is not None:
        chat = model.chat
        export_folder(cfg.export, model.cfg, model.params, chat.tokenizer, chat.format)
    if cfg.dump is not None:
        length = sum(len(sample.tokens) for sample in samples)
        arrays = flat_names(model.cfg, found.grads)  # of which every process holds a part
        arrays["logprobs"] = scatter(found.logp, found.index, length)
        if jax.process_index() == 0:
            with open(cfg.dump, "wb") as file:  # a name without .npz stays as it is
                np.savez(file, allow_pickle=False, **arrays)


def planned_batch(samples: Sequence[Sample], cfg: ReplayConfig) -> list[MicroBatch]:
    """The micro-batches of an update, each occurrence weighted as the loss averages."""
    trees = micro_batches(samples, cfg.merge, cfg.pack, mesh=cfg.mesh)
    return averaged(trees, samples, cfg.loss)


def timed_update(
    state: TrainState, samples: Sequence[Sample], cfg: ReplayConfig, step_cfg: StepConfig
) -> tuple[TrainState, Updated, float]:
    """One whole update, merging and packing included, what it came to, and its seconds.

    Nothing is planned ahead of the clock, but for the tiles of a micro-batch while the one
    before it is computed.
    """
    began = time.perf_counter()
    state, updated = update(state, planned_batch(samples, cfg), step_cfg)
    return jax.block_until_ready(state), updated, time.perf_counter() - began


def counts(
    samples: Sequence[Sample], trees: Sequence[MicroBatch], cfg: StepConfig
) -> dict[str, Any]:
    """How much there was, and how much of it was computed."""
    total = sum(len(sample.tokens) for sample in samples)
    unique = unique_tokens(samples)
    return {
        "samples": len(samples),
        "tokens_total": total,
        "tokens_unique": unique,
        "tokens_computed": sum(map(computed_tokens, trees)),
        "trained_tokens": sum(forest_of(tree).n_occurrences for tree in trees),
        "tree_token_ratio": total / unique,
        "attention_area": sum(map(attention_area, trees)),
        "attention_area_executed": sum(executed_area(tree, cfg) for tree in trees),
    }


def peak_rss() -> int:
    """Bytes of the process at its largest so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main()
