"""Does a model train, or decode, at a context on a TPU slice: with which mesh, how fast at best?

    python -m experiments.plan model=NAME_OR_DIR topology=v5p:8x8x8 context=200000
        [tokens_per_step=N] [mesh=auto|{fsdp:32,context:16}] [what=train|decode] [slots=N] ...

Compiles the programs of an update, or of a step of decoding, for chips that are not there, and
counts what they compute, move and send. Prints one JSON object, of the best mesh that fits; the
run folder holds plan.json, of all meshes, and plan.png. docs/scale.md tells how to read it.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from hydra.core.hydra_config import HydraConfig
from rich.console import Console
from rich.progress import Progress

from experiments.command import command
from experiments.planning import report, search
from experiments.planning.config import PlanConfig, read
from experiments.planning.models import sizes
from experiments.planning.outcome import Job, Measured, compiled, guess, outline, result
from experiments.planning.plots import draw
from experiments.planning.topology import devices, parse
from forge_jax.config import MeshConfig

SHOWN = 12  # meshes of a table


@command("plan", plain=("model", "mesh"))
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    jax.config.update("jax_platforms", "cpu")  # the chips planned for are not here
    return run(read(mapping), Path(HydraConfig.get().runtime.output_dir))


def run(cfg: PlanConfig, folder: Path) -> dict[str, Any]:
    """The command's result. Raises UserError naming a bad key."""
    # A file has no width of its own; a mesh should stand on one line of it.
    console = Console(stderr=True, log_path=False, width=None if sys.stderr.isatty() else 120)
    topology = parse(cfg.topology, cfg.slices)
    model = sizes(cfg.model)
    job = Job(cfg=cfg, model=model, topology=topology, devices=tuple(devices(topology)))
    if cfg.context > model.max_context:
        console.print(
            f"context={cfg.context} is beyond the {model.max_context} positions {cfg.model} "
            "was made for", style="yellow",
        )  # fmt: skip
    meshes = [cfg.mesh] if cfg.mesh else search.meshes(model, topology, cfg)
    for mesh in meshes:
        search.check(mesh, model, topology, cfg)
    with Progress(console=console) as bars:
        bar = bars.add_task("meshes", total=len(meshes))
        guesses = search.ranked(meshes, lambda m: guess(job, m), lambda: bars.advance(bar))
    console.print(tabulated(job, "estimates", guesses[:SHOWN]))
    measured = compile_best(job, [one.sizes for one in guesses[: cfg.compiled]], console)
    console.print(tabulated(job, "compiled", [one.candidate for one in measured]))
    folder.mkdir(parents=True, exist_ok=True)
    results = [result(job, one) for one in measured]
    kept = {"compiled": results, "estimates": [outline(one) for one in guesses]}
    (folder / "plan.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    draw(folder / "plan.png", [one.candidate for one in measured], guesses[:SHOWN], job.limit)
    return results[0] | {"run_dir": str(folder)}


def compile_best(job: Job, meshes: list[MeshConfig], console: Console) -> list[Measured]:
    """All compiled, the best first."""
    measured = []
    for mesh in meshes:
        with console.status(f"compiling {report.shape(mesh)}"):
            measured.append(compiled(job, mesh, console.log))
    return sorted(measured, key=lambda one: search.order(one.candidate))


def tabulated(job: Job, title: str, rows: list[search.Candidate]) -> Any:
    return report.table(f"{job.topology.name}: {title}", rows, job.limit, job.at_peak)


if __name__ == "__main__":
    main()
