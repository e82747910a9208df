"""What a round on the device does, and what came of it; records between scheduler and runner."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from forge_jax.rollout.jobs import Stay
from forge_jax.rollout.packets import DecodeShape, PrefillShape, Sampled
from forge_jax.rollout.prefix import Node


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A row of a prefill call."""

    row: int
    stay: Stay
    start: int  # position of the first token
    length: int
    published: tuple[tuple[int, Node], ...]  # number in the sequence and node of pages it fills


@dataclass(frozen=True, kw_only=True, eq=False)
class Prefill:
    """A call that computes keys and values."""

    shape: PrefillShape
    packet: np.ndarray
    parts: tuple[Part, ...]  # of some rows; the others are padding


@dataclass(frozen=True, kw_only=True, eq=False)
class Decode:
    """A call that samples."""

    shape: DecodeShape
    packet: np.ndarray
    owners: tuple[Stay | None, ...]  # by row


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """One round: calls that run in this order."""

    prefills: tuple[Prefill, ...]
    decode: Decode | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Results:
    """What the round of a plan came to."""

    plan: Plan
    version: int  # of the weights
    began: float  # when it was dispatched, on the clock of the submissions
    ended: float  # when it was read
    routes: tuple[Any, ...]  # int[R, T, layers, k] of each prefill call. None: not recorded
    scores: tuple[Any, ...]  # `packets.Scores` of each. None: it tells none
    block: Sampled | None  # None where the plan did not decode
