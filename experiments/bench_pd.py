"""Gaps between tokens while long prompts arrive: prefill and decode together, and apart.

    python -m experiments.bench_pd [model=bench-10m] [streams=4] [storm=8] [prompt=1536]
        [new_tokens=96] [chunk=512]

`streams` requests with short prompts are decoded; meanwhile `storm` long prompts, all different,
arrive one after the other and ask for a token each. Prints one JSON object with a row for each
engine. Virtual devices share the cores of this machine, so that prompts slow decoding down even
apart: what is seen is only that no token waits for a chunk to end.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from experiments.command import command
from experiments.models import resolve
from forge_jax.config import RolloutConfig, check, load
from forge_jax.rollout.disaggregated import DisaggregatedEngine
from forge_jax.rollout.engine import RolloutEngine
from forge_jax.sharding import make_mesh
from forge_jax.types import Request, Sampling


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One benchmark; see `configs/bench_pd.yaml`."""

    model: str = "bench-10m"
    streams: int = 4
    storm: int = 8
    prompt: int = 1536
    new_tokens: int = 96
    chunk: int = 512
    decode_steps: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("streams", "storm", "prompt", "chunk", "decode_steps"):
            check(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        check(self.new_tokens >= 2, f"new_tokens={self.new_tokens} must be at least 2")

    @property
    def rollout(self) -> RolloutConfig:
        context = -(-(self.prompt + self.new_tokens) // self.chunk) * self.chunk
        return RolloutConfig(
            slots=self.streams + 1,
            context=context,
            page=64,
            chunk=self.chunk,
            decode_steps=self.decode_steps,
            deterministic=True,  # one shape of each program: little to compile
        )


@command("bench_pd")
def main(mapping: dict[str, Any]) -> dict[str, Any]:
    cfg = load(BenchConfig, mapping)
    return {"rows": [asyncio.run(row(cfg, apart)) for apart in (False, True)]}


async def row(cfg: BenchConfig, apart: bool) -> dict[str, Any]:
    """Gaps between the tokens of a stream, in seconds, in quiet and in the storm."""
    async with opened(cfg, apart) as engine:
        await streams(engine, cfg, storm=0)  # whatever is done once is done
        quiet, _ = await streams(engine, cfg, storm=0)
        gaps, seconds = await streams(engine, cfg, storm=cfg.storm)
    return {
        "engine": "apart" if apart else "together",
        "itl_p50_quiet": float(np.median(quiet)),
        "itl_p50": float(np.median(gaps)),
        "itl_p99": float(np.quantile(gaps, 0.99)),
        "itl_max": float(max(gaps)),
        "storm_seconds": seconds,
    }


@asynccontextmanager
async def opened(
    cfg: BenchConfig, apart: bool
) -> AsyncIterator[RolloutEngine | DisaggregatedEngine]:
    with ExitStack() as stack:
        engines = []
        for place in range(2 if apart else 1):
            model = resolve(cfg.model, cfg.seed, mesh=make_mesh(devices=jax.devices()[place:]))
            device = stack.enter_context(ThreadPoolExecutor(1))
            tokenizer = model.chat.tokenizer
            engines.append(
                RolloutEngine(model.cfg, model.params, (), cfg.rollout, tokenizer, device)
            )
        engine: RolloutEngine | DisaggregatedEngine = engines[0]
        if apart:
            engine = DisaggregatedEngine(engines[1:], engines[:1], cfg.rollout)
        await engine.warm_up()
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(engine.serve())
            yield engine
            serving.cancel()


async def streams(engine: Any, cfg: BenchConfig, storm: int) -> tuple[list[float], float]:
    """Gaps between tokens of all streams while `storm` prompts arrive, and how long these took."""
    rng = np.random.default_rng(time.monotonic_ns())  # no prompt twice
    gaps: list[float] = []

    async def stream() -> None:
        last = None
        async for chunk in engine.generate(_asked(rng.integers(4, 200, 8), cfg.new_tokens)):
            now = time.monotonic()
            if last is not None:
                gaps.append((now - last) / len(chunk.ids))
            last = now

    async def prompts() -> float:
        began = time.monotonic()
        for _ in range(storm):
            async for _ in engine.generate(_asked(rng.integers(4, 200, cfg.prompt), 1)):
                pass
        return time.monotonic() - began

    async with asyncio.TaskGroup() as group:
        arriving = group.create_task(prompts())
        for _ in range(cfg.streams):
            group.create_task(stream())
    return gaps, arriving.result()


def _asked(prompt: np.ndarray, tokens: int) -> Request:
    sampling = Sampling(max_tokens=tokens, ignore_eos=True, seed=1)
    return Request(prompt=prompt.astype(np.int32), sampling=sampling)


if __name__ == "__main__":
    main()
