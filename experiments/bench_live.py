"""Routing policies on live engines, by the seconds to the first token that callers waited.

    XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m experiments.bench_live
        [engines=2] [policies=[cost,round_robin,sticky]] [repeat=2] [trace.rate=0.5]

The trace is one of the simulator's (`rollout/router/traces.py`), in small: its blocks are tokens
drawn by their keys, its replies are sampled. Policies take turns on the same engines, which are
given new weights in between, so that nothing is cached. A first turn of each is not counted: in it
its router learns what prefills and transfers take on this machine. A row is a policy.
"""

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from experiments.command import command
from experiments.models import resolve
from forge_jax.config import RolloutConfig, check, load
from forge_jax.rollout.engine import RolloutEngine
from forge_jax.rollout.router.baselines import POLICIES
from forge_jax.rollout.router.index import Block
from forge_jax.rollout.router.live import Router, RouterConfig
from forge_jax.rollout.router.traces import Session, TraceConfig, trace
from forge_jax.sharding import make_mesh
from forge_jax.types import Request, Sampling


@dataclass(frozen=True, kw_only=True)
class Waited:
    """One call."""

    seconds: float  # to its first token
    tokens: int  # of its prompt
    cached: int  # of those, not computed


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One benchmark; see `configs/bench_live.yaml`."""

    model: str = "bench-10m"
    engines: int = 2
    policies: tuple[str, ...] = ("cost", "round_robin", "sticky")
    trace: TraceConfig = field(default_factory=TraceConfig)
    slots: int = 8
    chunk: int = 256
    repeat: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("engines", "slots", "chunk", "repeat"):
            check(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        for policy in self.policies:
            known = ", ".join(POLICIES)
            check(policy in POLICIES, f"policies={policy!r} must be among {known}")

    @property
    def rollout(self) -> RolloutConfig:
        context = -(-self.trace.longest // self.chunk) * self.chunk
        return RolloutConfig(
            slots=self.slots,
            context=context,
            page=16,
            chunk=self.chunk,
            decode_steps=1,
            deterministic=True,  # one shape of each program: little to compile
        )


@command("bench_live")
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    return asyncio.run(measured(load(BenchConfig, mapping)))


async def measured(cfg: BenchConfig) -> dict[str, Any]:
    """All policies by turns, so that whatever else the machine does is shared alike."""
    found: dict[str, list[Waited]] = {policy: [] for policy in cfg.policies}
    fetched = dict.fromkeys(cfg.policies, 0.0)
    with ExitStack() as stack:
        engines, params, token_bytes = opened(cfg, stack)
        all_of_them = Router(engines, cfg.rollout, RouterConfig())
        await all_of_them.warm_up()
        serving = asyncio.create_task(all_of_them.serve())
        try:
            routers = {
                policy: Router(engines, cfg.rollout, RouterConfig(policy=policy))
                for policy in cfg.policies
            }
            for turn in range(cfg.repeat + 1):
                for policy, router in routers.items():
                    await router.swap(router.version + 1, params)
                    before = router.stats()["router_tokens_fetched"]
                    calls = await played(cfg, router, cfg.seed + turn)
                    if turn:
                        found[policy] += calls
                        fetched[policy] += router.stats()["router_tokens_fetched"] - before
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving
    return {
        "rows": [
            row(policy, found[policy], fetched[policy] * token_bytes) for policy in cfg.policies
        ],
        "engines": cfg.engines,
        "devices": len(jax.devices()),
    }


def row(policy: str, calls: list[Waited], moved: float) -> dict[str, Any]:
    waited = np.array([call.seconds for call in calls])
    return {
        "policy": policy,
        "trace": "live",
        "ttft_mean": float(waited.mean()),
        "ttft_p50": float(np.median(waited)),
        "ttft_p99": float(np.quantile(waited, 0.99)),
        "hit_rate": sum(call.cached for call in calls) / sum(call.tokens for call in calls),
        "transferred_bytes": moved,
        "calls": len(calls),
    }


def opened(cfg: BenchConfig, stack: ExitStack) -> tuple[dict[str, RolloutEngine], Any, int]:
    """Engines on devices of their own, as far as there are any, their weights, and the bytes of
    a token's keys and values."""
    devices, engines = jax.devices(), {}
    for number in range(cfg.engines):
        mesh = make_mesh(devices=[devices[number % len(devices)]])
        model = resolve(cfg.model, cfg.seed, mesh=mesh)
        device = stack.enter_context(ThreadPoolExecutor(1))
        args = (model.cfg, model.params, (), cfg.rollout, model.chat.tokenizer, device)
        engines[str(number)] = RolloutEngine(*args)
    sizes = model.cfg
    return engines, model.params, 2 * 4 * sizes.layers * sizes.kv_heads * sizes.head_dim


async def played(cfg: BenchConfig, router: Router, seed: int) -> list[Waited]:
    """The calls of a trace, each session by a caller of its own."""
    found: list[Waited] = []
    began = time.monotonic()

    async def session(one: Session) -> None:
        history: list[np.ndarray] = []
        await asyncio.sleep(max(0.0, one.start - (time.monotonic() - began)))
        for turn in one.turns:
            await asyncio.sleep(turn.pause)
            history += [text(block, seed) for block in turn.added]
            reply = sum(block.tokens for block in turn.reply)
            call, ids = await waited(router, np.concatenate(history), reply)
            found.append(call)
            history.append(ids)

    async with asyncio.TaskGroup() as group:
        for one in trace(cfg.trace, cfg.engines, seed):
            group.create_task(session(one))
    return found


async def waited(router: Router, prompt: np.ndarray, reply: int) -> tuple[Waited, np.ndarray]:
    """One call, and what was sampled."""
    asked = Request(prompt=prompt, sampling=Sampling(max_tokens=reply, ignore_eos=True, seed=1))
    began, first, ids = time.monotonic(), None, []
    async for chunk in router.generate(asked):
        if first is None:
            seconds = time.monotonic() - began
            first = Waited(seconds=seconds, tokens=len(prompt), cached=chunk.cached_tokens)
        ids.append(chunk.ids)
    assert first is not None, "a call without a chunk"
    return first, np.concatenate(ids).astype(np.int32)


def text(block: Block, seed: int) -> np.ndarray:
    """The tokens of a block, the same wherever it stands."""
    assert isinstance(block.key, int)
    return np.random.default_rng((seed, block.key)).integers(4, 200, block.tokens).astype(np.int32)


if __name__ == "__main__":
    main()
