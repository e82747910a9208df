"""What structured output costs: microseconds a token on the host, and tokens a second.

    python -m experiments.bench_grammar [model=bench-10m] [kind=json] [grammar=SCHEMA] [requests=8]

The same requests are answered with the grammar and without. Then everything that the host did
for each token of the first answers is done again, and timed: reading the token, looking for
forced ones, and the set of those that may come. Prints one JSON object.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.command import command
from experiments.models import resolve
from forge_jax.config import RolloutConfig, check, load
from forge_jax.drawing import LOST
from forge_jax.models.load import LoadedModel
from forge_jax.rollout.engine import RolloutEngine
from forge_jax.rollout.grammar import Grammars
from forge_jax.types import Chunk, Finish, Grammar, Request, Sampling

STEPS = 4  # tokens of a device call


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One benchmark; see `configs/bench_grammar.yaml`."""

    model: str
    kind: str
    grammar: str
    prompt: str
    requests: int
    max_tokens: int
    temperature: float
    support: int
    slots: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "max_tokens", "slots"):
            check(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        assert self.asked

    @property
    def asked(self) -> Grammar:
        """What answers belong to."""
        return Grammar(kind=self.kind, text=self.grammar)


@command("bench_grammar")
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    cfg = load(BenchConfig, mapping)
    return asyncio.run(measured(cfg, resolve(cfg.model, cfg.seed)))


async def measured(cfg: BenchConfig, model: LoadedModel) -> dict[str, Any]:
    """The command's result."""
    chat = model.chat
    text = chat.format.render([{"role": "user", "content": cfg.prompt}])
    prompt = np.array(chat.tokenizer.encode(text), np.int32)
    rollout = RolloutConfig(
        slots=cfg.slots, context=len(prompt) + cfg.max_tokens, decode_steps=STEPS, shaping=True,
        support=cfg.support, deterministic=True,
    )  # fmt: skip
    with ThreadPoolExecutor(1, "device") as device:
        engine = RolloutEngine(
            model.cfg, model.params, chat.stop_ids, rollout, chat.tokenizer, device, seed=cfg.seed
        )
        await engine.warm_up()
        serving = asyncio.create_task(engine.serve())
        plain, plain_seconds = await timed(cfg, engine, prompt, None)
        guided, seconds = await timed(cfg, engine, prompt, cfg.asked)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    tokens = [np.concatenate([chunk.ids for chunk in chunks]) for chunks in guided]
    lost = [c.support.kind == LOST for chunks in guided for c in chunks if c.support is not None]
    return {
        "vocab": model.cfg.vocab,
        "tokens_out": sum(map(len, tokens)),
        "ended": sum(chunks[-1].finish is Finish.STOP for chunks in guided),
        "lost_share": float(np.concatenate(lost).mean()),
        "tokens_per_second": sum(map(len, tokens)) / seconds,
        "tokens_per_second_plain": sum(len(c.ids) for cs in plain for c in cs) / plain_seconds,
        **host_costs(cfg, model, tokens),
    }


async def timed(
    cfg: BenchConfig, engine: RolloutEngine, prompt: np.ndarray, grammar: Grammar | None
) -> tuple[list[list[Chunk]], float]:
    """The chunks of every request, and the seconds that all of them took."""

    async def one(choice: int) -> list[Chunk]:
        sampling = Sampling(
            temperature=cfg.temperature, max_tokens=cfg.max_tokens, seed=cfg.seed, choice=choice,
            grammar=grammar,
        )  # fmt: skip
        return [chunk async for chunk in engine.generate(Request(prompt=prompt, sampling=sampling))]

    began = time.monotonic()
    found = await asyncio.gather(*(one(choice) for choice in range(cfg.requests)))
    return list(found), time.monotonic() - began


def host_costs(
    cfg: BenchConfig, model: LoadedModel, answers: Sequence[np.ndarray]
) -> dict[str, Any]:
    """What the grammar takes of the host, for tokens i32[n] of each answer."""
    grammars = Grammars(model.chat.tokenizer, model.cfg.vocab, model.chat.stop_ids)
    began = time.perf_counter()
    grammars.open()
    opened = time.perf_counter()
    grammars.matcher(cfg.asked)
    compiled = time.perf_counter()
    seconds, forced = [], 0
    for answer in answers:
        matcher, known = grammars.matcher(cfg.asked), 0
        while known < len(answer):
            start = time.perf_counter()
            matcher.advance(answer[:known], STEPS)
            seconds.append(time.perf_counter() - start)
            forced += len(matcher.forced)
            known += matcher.steps
    micros = 1e6 * np.array(seconds)
    total = sum(map(len, answers))
    return {
        "open_seconds": opened - began,
        "compile_ms": 1e3 * (compiled - opened),
        "calls_per_token": len(seconds) / total,
        "forced_share": forced / total,
        "us_per_token": float(micros.sum() / total),
        "us_per_call_p50": float(np.median(micros)),
        "us_per_call_p99": float(np.quantile(micros, 0.99)),
    }


if __name__ == "__main__":
    main()
