"""What a round on the device does, and what came of it; records between scheduler and runner."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from forge_jax.rollout.jobs import Job
from forge_jax.rollout.packets import DecodeShape, PrefillShape, Sampled


@dataclass(frozen=True, kw_only=True, eq=False)
class Prefill:
    shape: PrefillShape
    packet: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Decode:
    shape: DecodeShape
    packet: np.ndarray
    owners: tuple[Job | None, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    prefills: tuple[Prefill, ...]
    decode: Decode | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Results:
    plan: Plan
    version: int
    began: float
    routes: tuple[Any, ...]
    block: Sampled | None
