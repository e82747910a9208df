"""Gaps between tokens while long prompts arrive: prefill and decode together, and apart.

    XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m experiments.bench_pd
        [model=bench-10m] [streams=4] [storm=8] [prompt=1536] [chunk=512] [repeat=3]
        [mesh.tensor=1] [prefill.tensor=1] [together.tensor=1]

`streams` requests are decoded all the time; meanwhile `storm` long prompts, all different, arrive
one after the other and ask for a token each. One engine does both on the mesh `together`; the
other decodes on `mesh` and prefills on `prefill`, the devices behind those. They take turns,
`repeat` times. Prints one JSON object with a row for each engine, the ratio of their gaps, and
how fast pages move between the two meshes; the run folder holds rows.json and gaps.png.

Virtual devices share the cores of this machine, so prompts slow decoding down even apart: what
is seen is only that no token waits for a chunk to end. Gaps are told in seconds of the wall and in
seconds that all threads of this process worked meanwhile ("cpu"), which other programs on the
machine do not lengthen.
"""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from hydra.core.hydra_config import HydraConfig
from jax.sharding import Mesh
from matplotlib.figure import Figure

from experiments.command import command
from experiments.models import resolve
from forge_jax.config import MeshConfig, RolloutConfig, UserError, check, load
from forge_jax.rollout.disaggregated import DisaggregatedEngine, decoding
from forge_jax.rollout.engine import RolloutEngine
from forge_jax.sharding import mesh_from
from forge_jax.types import Request, Sampling

ENGINES = ("together", "apart")
Gaps = list[tuple[float, float]]  # seconds of the wall, and of CPUs


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One benchmark; see `configs/bench_pd.yaml`."""

    model: str = "bench-10m"
    together: MeshConfig = field(default_factory=MeshConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    prefill: MeshConfig = field(default_factory=MeshConfig)
    streams: int = 4
    storm: int = 8
    prompt: int = 1536
    new_tokens: int = 96
    chunk: int = 512
    decode_steps: int = 1
    deterministic: bool = False
    repeat: int = 3
    seed: int = 0
    out: str | None = None

    def __post_init__(self) -> None:
        for name in ("streams", "storm", "prompt", "chunk", "decode_steps", "repeat"):
            check(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        check(self.new_tokens >= 2, f"new_tokens={self.new_tokens} must be at least 2")

    @property
    def rollout(self) -> RolloutConfig:
        context = -(-(self.prompt + self.new_tokens) // self.chunk) * self.chunk
        meshes = (self.together, self.mesh, self.prefill)
        places = math.lcm(*(mesh.places * mesh.context for mesh in meshes))
        return RolloutConfig(
            slots=-(-(self.streams + 1) // places) * places,
            context=context,
            page=64,
            chunk=self.chunk,
            decode_steps=self.decode_steps,
            deterministic=self.deterministic,
        )


@command("bench_pd")
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    return run(load(BenchConfig, mapping), Path(HydraConfig.get().runtime.output_dir))


def run(cfg: BenchConfig, folder: Path) -> dict[str, Any]:
    """The command's result. Raises UserError where there are too few devices."""
    if (folder / "rows.json").exists():
        raise UserError(f"out={folder} holds a benchmark already")
    found = asyncio.run(measured(cfg))
    draw(folder / "gaps.png", {row["engine"]: row.pop("gaps") for row in found["rows"]})
    (folder / "rows.json").write_text(json.dumps(found, indent=1) + "\n")
    return found | {"run_dir": str(folder)}


async def measured(cfg: BenchConfig) -> dict[str, Any]:
    """Both engines by turns, so that whatever else the machine does is shared alike."""
    rng = np.random.default_rng(cfg.seed)  # no prompt twice
    async with AsyncExitStack() as stack:
        engines = {name: await stack.enter_async_context(opened(cfg, name)) for name in ENGINES}
        for engine in engines.values():
            await storm(engine, cfg, rng, storm=1)  # whatever is done once is done
        quiet = {name: await storm(engine, cfg, rng, storm=0) for name, engine in engines.items()}
        turns: dict[str, list[tuple[Gaps, float]]] = {name: [] for name in ENGINES}
        for _ in range(cfg.repeat):
            for name, engine in engines.items():
                turns[name].append(await storm(engine, cfg, rng, storm=cfg.storm))
        moved = engines["apart"].stats()
    rows = [row(name, quiet[name][0], turns[name]) for name in ENGINES]
    one, other = rows
    compared = ("itl_p50", "itl_p99", "itl_cpu_p50", "itl_cpu_p99")
    return {
        "rows": rows,
        "ratio": {key: one[key] / other[key] for key in compared},
        "moved_bytes": moved["moved_bytes"],
        "moved_bytes_per_second": moved["moved_bytes"] / moved["moved_seconds"],
        "devices": len(jax.devices()),
    }


def row(name: str, quiet: Gaps, turns: Sequence[tuple[Gaps, float]]) -> dict[str, Any]:
    """Gaps between the tokens of a stream, in seconds, without a storm and in all of them."""
    gaps = [gap for some, _ in turns for gap in some]
    found: dict[str, Any] = {"engine": name, "tokens": len(gaps)}
    for clock, words in enumerate(("itl", "itl_cpu")):
        for when, some in (("_quiet", quiet), ("", gaps)):
            seconds = np.array(some)[:, clock]
            found[f"{words}_p50{when}"] = float(np.median(seconds))
            found[f"{words}_p99{when}"] = float(np.quantile(seconds, 0.99))
        found[f"{words}_p99_by_turn"] = [
            float(np.quantile(np.array(some)[:, clock], 0.99)) for some, _ in turns
        ]
    found["storm_seconds"] = float(np.mean([seconds for _, seconds in turns]))
    return found | {"gaps": gaps}


@asynccontextmanager
async def opened(cfg: BenchConfig, name: str) -> AsyncIterator[RolloutEngine | DisaggregatedEngine]:
    """An engine that serves."""
    if name == "together":
        meshes = [mesh_from(cfg.together)]
    else:
        decode = mesh_from(cfg.mesh)
        meshes = [decode, mesh_from(cfg.prefill, jax.devices()[decode.size :])]
    with ExitStack() as stack:
        sizes = [cfg.rollout] if name == "together" else [decoding(cfg.rollout), cfg.rollout]
        made = [
            one(cfg, mesh, rollout, stack.enter_context(ThreadPoolExecutor(1)))
            for mesh, rollout in zip(meshes, sizes, strict=True)
        ]
        engine: RolloutEngine | DisaggregatedEngine = made[0]
        if name == "apart":
            engine = DisaggregatedEngine(made[1:], made[:1], cfg.rollout)
        await engine.warm_up()
        serving = asyncio.create_task(engine.serve())
        try:
            yield engine
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving


def one(
    cfg: BenchConfig, mesh: Mesh, rollout: RolloutConfig, device: ThreadPoolExecutor
) -> RolloutEngine:
    model = resolve(cfg.model, cfg.seed, mesh=mesh)
    return RolloutEngine(model.cfg, model.params, (), rollout, model.chat.tokenizer, device)


async def storm(
    engine: Any, cfg: BenchConfig, rng: np.random.Generator, storm: int
) -> tuple[Gaps, float]:
    """Gaps between tokens of all streams while `storm` prompts arrive, and how long these took;
    without any, as long as a stream lasts."""
    gaps: Gaps = []
    over = asyncio.Event()

    async def stream() -> None:
        while not over.is_set():
            last = None
            async for chunk in engine.generate(_asked(rng.integers(4, 200, 8), cfg.new_tokens)):
                now = np.array([time.monotonic(), time.process_time()])
                if last is not None and not over.is_set():
                    wall, cpu = (now - last) / len(chunk.ids)
                    gaps.append((float(wall), float(cpu)))
                last = now
            if storm == 0:
                return

    async def prompts() -> float:
        began = time.monotonic()
        for _ in range(storm):
            async for _ in engine.generate(_asked(rng.integers(4, 200, cfg.prompt), 1)):
                pass
        if storm:
            over.set()
        return time.monotonic() - began

    async with asyncio.TaskGroup() as group:
        for _ in range(cfg.streams):
            group.create_task(stream())
        arriving = group.create_task(prompts())
    return gaps, arriving.result()


def draw(path: Path, gaps: Mapping[str, Gaps]) -> None:
    """How many of the gaps are longer than so many milliseconds, by either clock."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for clock, (axis, words) in enumerate(zip(axes, ("ms", "CPU-ms"), strict=True)):
        for name, some in gaps.items():
            milliseconds = np.sort(np.array(some)[:, clock]) * 1e3
            axis.step(milliseconds, 1 - np.arange(len(some)) / len(some), label=name)
        axis.axhline(0.01, color="gray", lw=0.8, ls=":")
        axis.set(xscale="log", yscale="log", xlabel=f"gap between two tokens, {words}")
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("share that is longer")
    axes[0].legend()
    figure.savefig(path, dpi=120)


def _asked(prompt: np.ndarray, tokens: int) -> Request:
    sampling = Sampling(max_tokens=tokens, ignore_eos=True, seed=1)
    return Request(prompt=prompt.astype(np.int32), sampling=sampling)


if __name__ == "__main__":
    main()
