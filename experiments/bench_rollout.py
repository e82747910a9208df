"""Tokens a second of the rollout engine, on groups of requests that share a prefix.

    python -m experiments.bench_rollout [model=bench-10m] [requests=64] [group=8] [prefix=512]
        [own=16] [new_tokens=64] [turns=1] [observation=48] [prefix_cache=true] [speculate=off]
        [places=1]

All requests arrive at once and ask for log-probs. With `turns` above 1 each is an agent: its
next prompt is the last one, the answer to it and an observation. Prints one JSON object;
seconds are those of the fastest of `repeat` runs, each begun with an empty prefix cache. The
engine's slots are dealt to `places` devices; on a CPU these are cores, if there are slots enough.
"""

import asyncio
import os
import resource
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress

from experiments.command import command
from experiments.models import resolve
from forge_jax.config import RolloutConfig, check, load
from forge_jax.models.load import LoadedModel
from forge_jax.rollout.engine import RolloutEngine
from forge_jax.sharding import make_mesh
from forge_jax.types import Request, Sampling

RESERVED = 4  # ids below it are in no prompt
SLOTS = 32  # of a core, or it computes rows too few at a time


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Those of `RolloutConfig` that are worth a comparison."""

    slots: int = 64
    page: int = 16
    chunk: int = 256
    decode_steps: int = 32
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One benchmark; see `configs/bench_rollout.yaml`."""

    model: str = "bench-10m"
    requests: int = 64
    group: int = 8
    prefix: int = 512
    own: int = 16
    new_tokens: int = 64
    turns: int = 1
    observation: int = 48
    temperature: float = 1.0
    prefix_cache: bool = True
    speculate: str = "off"
    places: int | None = None  # see `over_cores`
    repeat: int = 3
    seed: int = 0
    engine: Sizes = field(default_factory=Sizes)

    def __post_init__(self) -> None:
        for name in ("requests", "group", "own", "new_tokens", "turns", "observation", "repeat"):
            check(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        for name in ("prefix", "temperature", "seed"):
            check(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must be >= 0")
        assert self.rollout  # which checks the sizes of the engine

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        later = (self.turns - 1) * (self.new_tokens + self.observation)
        return self.prefix + self.own + self.new_tokens + later

    @property
    def rollout(self) -> RolloutConfig:
        """The engine that is measured."""
        sizes = self.engine
        return RolloutConfig(
            slots=sizes.slots,
            context=self.context,
            page=sizes.page,
            chunk=sizes.chunk,
            decode_steps=sizes.decode_steps,
            dtype=sizes.dtype,
            prefix_cache=self.prefix_cache,
            speculate=self.speculate,
            places=self.places,
        )


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a caller saw of one request."""

    prompt: np.ndarray  # i32[P]
    output: np.ndarray  # i32[n]
    cached: int  # tokens of the prompt
    first: float  # seconds until the first token came
    gaps: tuple[float, ...]  # seconds a token, of every later chunk


@command("bench_rollout")
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    cfg = over_cores(load(BenchConfig, mapping))
    mesh = make_mesh(data=cfg.places or 1)
    model = resolve(cfg.model, cfg.seed, mesh=mesh)
    return asyncio.run(measured(cfg, model))


def places_of(slots: int, cores: int) -> int:
    """Cores that `slots` are dealt to evenly, `SLOTS` or more to each."""
    return max((n for n in range(1, min(cores, slots // SLOTS) + 1) if slots % n == 0), default=1)


def over_cores(cfg: BenchConfig) -> BenchConfig:
    """With as many places as a CPU has cores for, and a device for each; to be called before
    devices are used. Elsewhere there is one place unless more are asked for."""
    places = cfg.places
    if places is None:
        places = places_of(cfg.engine.slots, len(os.sched_getaffinity(0)))
    if places > 1:
        jax.config.update("jax_num_cpu_devices", places)
    if cfg.places is None and jax.default_backend() != "cpu":
        places = 1
    return replace(cfg, places=places)


async def measured(cfg: BenchConfig, model: LoadedModel) -> dict[str, Any]:
    """The command's result."""
    with ThreadPoolExecutor(1, "device") as device, Progress(console=Console(stderr=True)) as bar:
        engine = RolloutEngine(
            model.cfg, model.params, (), cfg.rollout, model.chat.tokenizer, device, seed=cfg.seed
        )
        stage = bar.add_task("compiling", total=None)
        await engine.warm_up()
        serving = asyncio.create_task(engine.serve())
        runs = []
        for repeat in range(cfg.repeat):
            total = cfg.requests * cfg.turns
            bar.reset(stage, description=f"run {repeat + 1} of {cfg.repeat}", total=total)
            # Another version of the same weights: nothing cached is of it.
            await engine.swap(repeat + 1, model.params)
            runs.append(await timed(cfg, engine, model.cfg.vocab, lambda: bar.advance(stage)))
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    return min(runs, key=lambda run: run["seconds"])


async def timed(cfg: BenchConfig, engine: RolloutEngine, vocab: int, tell: Any) -> dict[str, Any]:
    """One run of all requests."""
    before, cpu, began = dict(engine.stats()), time.process_time(), time.monotonic()
    rng = np.random.default_rng(cfg.seed)
    agents = [agent(cfg, engine, *given, tell) for given in enumerate(prompts(cfg, vocab, rng))]
    calls = [call for played in await asyncio.gather(*agents) for call in played]
    seconds = time.monotonic() - began
    cpu = time.process_time() - cpu
    stats = {name: value - before[name] for name, value in engine.stats().items()}
    return report(cfg, calls, seconds, cpu, stats)


def prompts(cfg: BenchConfig, vocab: int, rng: np.random.Generator) -> list[np.ndarray]:
    """The first prompt of every request, i32[prefix + own] each."""

    def draw(size: int) -> np.ndarray:
        return rng.integers(min(RESERVED, vocab - 1), vocab, size, dtype=np.int32)

    made = []
    for index in range(cfg.requests):
        if index % cfg.group == 0:
            shared = draw(cfg.prefix)
        made.append(np.concatenate([shared, draw(cfg.own)]))
    return made


async def agent(
    cfg: BenchConfig, engine: RolloutEngine, index: int, prompt: np.ndarray, tell: Any
) -> list[Call]:
    """All calls of one request."""
    rng = np.random.default_rng((cfg.seed, index))
    calls = []
    for turn in range(cfg.turns):
        sampling = Sampling(
            temperature=cfg.temperature,
            max_tokens=cfg.new_tokens,
            seed=cfg.seed,
            choice=index * cfg.turns + turn,
            ignore_eos=True,
        )
        calls.append(await call(engine, Request(prompt=prompt, sampling=sampling)))
        observed = rng.integers(0, prompt.max() + 1, cfg.observation, dtype=np.int32)
        prompt = np.concatenate([prompt, calls[-1].output, observed])
        tell()
    return calls


async def call(engine: RolloutEngine, request: Request) -> Call:
    """Asks, and keeps the time of every chunk."""
    last, output, cached, waits = time.monotonic(), [], 0, []
    async for chunk in engine.generate(request):
        now = time.monotonic()
        if len(chunk.ids):
            waits.append((now - last, len(chunk.ids)))
            last = now
        output.append(chunk.ids)
        cached += chunk.cached_tokens
    return Call(
        prompt=request.prompt,
        output=np.concatenate(output),
        cached=cached,
        first=waits[0][0],
        gaps=tuple(wait / count for wait, count in waits[1:] for _ in range(count)),
    )


def report(
    cfg: BenchConfig, calls: list[Call], seconds: float, cpu: float, stats: Mapping[str, float]
) -> dict[str, Any]:
    """The numbers of one run."""
    tokens = sum(len(call.output) for call in calls)
    first = [call.first for call in calls]
    gaps = [gap for call in calls for gap in call.gaps] or [0.0]
    drafted = stats["draft_tokens"]
    return {
        "tokens_out": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "prompt_tokens": sum(len(call.prompt) for call in calls),
        "prefill_tokens": int(stats["tokens_prefilled"]),
        "cached_tokens": sum(call.cached for call in calls),
        "acceptance": stats["accepted_tokens"] / drafted if drafted else None,
        "ttft_p50": float(np.percentile(first, 50)),
        "ttft_p99": float(np.percentile(first, 99)),
        "itl_p50": float(np.percentile(gaps, 50)),
        "cpu_seconds": cpu,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "programs_traced": int(stats["programs_traced"]),  # in the timed run: none
        "model": cfg.model,
        "places": cfg.places or 1,
        "device": jax.devices()[0].device_kind,
    }


if __name__ == "__main__":
    main()
