"""Prefix-tree training against its baselines, side by side on one machine.

    python -m experiments.bench_tree [workloads=[agentic,forge40,think,fork]] [model=bench-10m]
        [steps=3] [none_steps=1] [out=DIR] [peers.NAME="COMMAND"]

Three modes make whole updates of the same samples: `none` trains every call by itself (packed,
not padded), `chain` merges calls that append to earlier ones, `tree` computes every token of
the prefix forest once. Each is a process of its own; all are compiled first, then they take
turns, one at a time, with a large matrix product in between. Modes whose loss or gradient norm
differ are not compared. A workload is a name of `experiments.workloads` or a file; `peers` are
other programs, see `experiments.bench.peers`. The run folder holds rows.json, the plots, and a
picture of each forest.

Every mode has the whole machine while it computes, but the memory of all is held at once.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from hydra.core.hydra_config import HydraConfig
from rich.console import Console
from rich.progress import Progress

from experiments.bench.children import Child
from experiments.bench.config import BenchConfig, workload_name
from experiments.bench.machine import hardware, line
from experiments.bench.measure import Bench, measure_context, measure_workload
from experiments.bench.plots import draw_context, draw_speedup
from experiments.bench.report import peer_table, table
from experiments.bench.worker import product_job
from experiments.command import command
from experiments.models import resolve
from experiments.workloads import SHAPES, write
from forge_jax.config import UserError, load
from forge_jax.models.config import ModelConfig
from forge_jax.models.hf import export_folder
from forge_jax.rl.forest_plot import draw_forest_and_tiles
from forge_jax.rl.writing import write_whole
from forge_jax.sched.merge import merge, unique_tokens
from forge_jax.sched.workload import read_workload
from forge_jax.types import Sample

DRAWN = 20_000  # unique tokens in the picture of a forest, at most


@command("bench_tree", texts=("peers",))
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    if isinstance(mapping["workloads"], str):
        mapping["workloads"] = [mapping["workloads"]]
    cfg = load(BenchConfig, mapping)
    jax.config.update("jax_platforms", "cpu")  # of this process; devices are for its children
    return run(cfg, Path(HydraConfig.get().runtime.output_dir))


def run(cfg: BenchConfig, folder: Path) -> dict[str, Any]:
    """The command's result. Raises UserError for what cannot be benchmarked."""
    if (folder / "rows.json").exists():
        raise UserError(f"out={folder} holds a benchmark already")
    console = Console(stderr=True)
    model = prepare(cfg, folder)
    workloads = {workload_name(workload): workload for workload in cfg.workloads}
    files = {name: file_of(name, said, cfg, model, folder) for name, said in workloads.items()}
    samples = {name: read_workload(str(file), model.vocab) for name, file in files.items()}
    machine = hardware()
    found: dict[str, Any] = {"machine": machine, "model": cfg.model, "rows": [], "context": []}

    def keep(kind: str, measured: dict[str, Any]) -> None:
        found[kind].append(measured)
        write_whole(folder / "rows.json", json.dumps(found, indent=1) + "\n")
        bars.update(bar, advance=1)

    with (
        Progress(console=console) as bars,
        Child("matrix products", product_job(), folder / "products.log") as products,
    ):
        bar = bars.add_task("compiling", total=len(files) + len(cfg.contexts))
        bench = Bench(
            cfg=cfg,
            model=model,
            folder=folder,
            products=products,
            tell=lambda now: bars.update(bar, description=now),
        )
        products.ask()
        for name, file in files.items():
            keep("rows", measure_workload(bench, name, file, samples[name]))
            forest = merge(legible(samples[name]), "tree")
            draw_forest_and_tiles(folder / f"forest_{name}.png", forest, cfg.pack.side, name)
        for length in cfg.contexts:
            keep("context", measure_context(bench, length))
    draw_speedup(folder / "speedup.png", found["rows"])
    if found["context"]:
        draw_context(folder / "context.png", found["context"])
    console.print(table(found["rows"], f"{cfg.model} on {line(machine)}"))
    if cfg.peers:
        console.print(peer_table(found["rows"]))
    return found | {"run_dir": str(folder)}


def prepare(cfg: BenchConfig, folder: Path) -> ModelConfig:
    """The sizes of the model, whose weights are exported where a peer wants them."""
    model = resolve(cfg.model, cfg.seed)
    if any(peer.wants_model for peer in cfg.programs()):
        chat = model.chat
        export_folder(folder / "model", model.cfg, model.params, chat.tokenizer, chat.format)
    return model.cfg


def file_of(name: str, workload: str, cfg: BenchConfig, model: ModelConfig, folder: Path) -> Path:
    """The file of a workload, written into the run folder where it is one of ours."""
    if workload not in SHAPES:
        return Path(workload)
    file = folder / f"{name}.npz"
    write(file, SHAPES[workload], model.vocab, cfg.seed)
    return file


def legible(samples: Sequence[Sample]) -> Sequence[Sample]:
    """The first samples, as many as a picture can show; at least one."""
    fits, too_many = 1, len(samples) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if unique_tokens(samples[:middle]) <= DRAWN:
            fits = middle
        else:
            too_many = middle
    return samples[:fits]


if __name__ == "__main__":
    main()
