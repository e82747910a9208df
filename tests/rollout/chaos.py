"""Random trouble for an engine: what clients, trainers, stores and operators do, all at once.

An engine and a seed flow in, what every caller has seen flows out.
"""

import asyncio
import random
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from faulty_store import Faulty
from small_engine import ask, weights_of

from forge_jax.drawing import Grammar
from forge_jax.models.config import ModelConfig
from forge_jax.rollout.engine import RolloutEngine
from forge_jax.types import Chunk, Request

STOP = 258
WORD = Grammar(kind="regex", text="[a-f]{3,12}")
SETTINGS: list[dict[str, Any]] = [
    {},
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"stop_ids": (3, 40, 77)},
    {"top_k": 5, "top_p": 0.9},
    {"presence_penalty": 1.0, "logit_bias": ((7, 2.0),)},
    {"grammar": WORD},
    {"prompt_logprobs": 2},
]
FAULTS: list[dict[str, Any]] = [
    {"cut": 7},
    {"flip": 100},
    {"flip": -9},
    {"read_error": OSError("gone")},
    {"write_error": OSError("full")},
    {"silent": True},
    {"delay": 0.02},
    {"delay": 0.2},
]
SOUND = {
    "cut": 0, "flip": None, "read_error": None, "write_error": None, "silent": False, "delay": 0.0,
}  # fmt: skip
MODES = ("keep", "recompute", "wait", "abort")


@dataclass
class Seen:
    """What one caller has seen."""

    request: Request
    began: int  # version of the weights when it asked
    left: bool = False  # before the end
    chunks: list[Chunk] = field(default_factory=list)

    def joint(self, name: str) -> np.ndarray:
        """A field of all tokens; an aborted request's last chunk has none."""
        parts = [getattr(chunk, name) for chunk in self.chunks if len(chunk.ids)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)


class Storm:
    """Callers come and go, weights change, pauses begin and end, the store breaks and recovers."""

    def __init__(self, engine: RolloutEngine, cfg: ModelConfig, faulty: Faulty, seed: int):
        self.engine, self.cfg, self.faulty = engine, cfg, faulty
        self.rng = random.Random(seed)
        self.seen: list[Seen] = []
        self._callers: set[asyncio.Task[None]] = set()
        self._ends, self._least = 0.0, 0

    async def run(self, seconds: float, least: int) -> None:
        """For so many seconds, and until so many have asked. Raises what any part raises; every
        caller has ended at its end."""
        self._ends, self._least = asyncio.get_running_loop().time() + seconds, least
        async with asyncio.TaskGroup() as group:
            for trouble in (self._arrivals, self._operator, self._store):
                group.create_task(trouble())
        for name, value in SOUND.items():
            setattr(self.faulty, name, value)
        await asyncio.gather(*self._callers)

    def _goes_on(self) -> bool:
        return asyncio.get_running_loop().time() < self._ends or len(self.seen) < self._least

    async def _more(self, callers: int) -> None:
        """Until so many more have asked: the pace of an engine, however slow the machine."""
        until = len(self.seen) + callers
        while len(self.seen) < until and self._goes_on():
            await asyncio.sleep(0.002)

    async def _arrivals(self) -> None:
        while self._goes_on():
            while len(self._callers) > 60:
                await asyncio.sleep(0.01)
            for _ in range(self.rng.choice([1, 1, 2, 8])):
                task = asyncio.create_task(self._caller())
                self._callers.add(task)
                task.add_done_callback(self._callers.discard)
            await asyncio.sleep(self.rng.choice([0, 0.002, 0.02]))

    async def _operator(self) -> None:
        while self._goes_on():
            await self._more(self.rng.randrange(60))
            if self.rng.random() < 0.5:
                version = self.engine.version + 1
                await self.engine.swap(version, weights_of(self.cfg, version % 3))
            else:
                await self.engine.pause(self.rng.choice(MODES))
                await asyncio.sleep(self.rng.random() * 0.03)
                self.engine.resume()

    async def _store(self) -> None:
        while self._goes_on():
            for name, value in (SOUND | self.rng.choice(FAULTS)).items():
                setattr(self.faulty, name, value)
            await asyncio.sleep(self.rng.random() * 0.2)
            for name, value in SOUND.items():
                setattr(self.faulty, name, value)
            await asyncio.sleep(self.rng.random() * 0.3)

    async def _caller(self) -> None:
        seen = Seen(self._request(), self.engine.version)
        self.seen.append(seen)
        leaves = self.rng.choice([None, None, None, 0, 1, 2])
        if leaves == 0:
            task = asyncio.create_task(self._listen(seen, None))
            await asyncio.sleep(self.rng.random() * 0.02)
            seen.left = task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        else:
            await self._listen(seen, leaves)

    async def _listen(self, seen: Seen, leaves: int | None) -> None:
        async with aclosing(self.engine.generate(seen.request)) as chunks:
            async for chunk in chunks:
                seen.chunks.append(chunk)
                if len(seen.chunks) == leaves and chunk.finish is None:
                    seen.left = True
                    return

    def _request(self) -> Request:
        """Of a few beginnings, cut anywhere, some with an end of its own."""
        rng = self.rng
        beginning = np.random.default_rng(rng.randrange(4)).integers(0, 256, 40)
        own = [rng.randrange(256) for _ in range(rng.choice([0, 1, 5]))]
        tokens = np.array([*beginning[: rng.randrange(1, 41)], *own], np.int32)
        settings = rng.choice(SETTINGS)
        most = 12 if "grammar" in settings else rng.choice([None, 1, 3, 9])
        seed, choice = rng.randrange(1000), rng.randrange(3)
        return ask(tokens, seed=seed, choice=choice, max_tokens=most, **settings)
