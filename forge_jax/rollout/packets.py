"""Integer layouts of what crosses between host and device: one array per device call.

A prefill call takes ``i32[R, HEADER + T]``, a row per prompt: its header, then its tokens
padded to the bucket. Every call returns ``i32[..., 3]``, a token, its log-prob and its status.
Floats travel as their bits, so that nothing is rounded on the way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

# Columns of a prefill row's header; STOP is the first of STOP_IDS columns, -1 where unused.
SLOT, LENGTH, LIMIT, SEED_HIGH, SEED_LOW, CHOICE, TEMPERATURE, STOP = range(8)
STOP_IDS = 16
HEADER = STOP + STOP_IDS

# Columns of a result.
TOKEN, LOGP, STATUS = range(3)
# Statuses: no token was sampled; the request goes on; it met a stop id; its limit is used up.
IDLE, GOES_ON, STOPPED, EXHAUSTED = range(4)


class Sampled(NamedTuple):
    """What a device call gives: of a prefill for R prompts, of a decode for K steps of B slots."""

    packet: Any  # i32[R, 3] or i32[K, B, 3]
    # int[R, T, layers, k] or int[K, B, layers, k], the experts of the tokens that were fed:
    # of whole prompts, or of the token before the sampled one. None: not recorded.
    routes: Any


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """What the device must know of a request to sample it."""

    prompt: np.ndarray  # i32[P]
    limit: int  # tokens it may sample
    seed: tuple[int, int]  # high and low 32 bits
    choice: int
    temperature: float
    stop_ids: tuple[int, ...]  # at most STOP_IDS


def pack_prefill(
    rows: Sequence[tuple[int, Row]], height: int, bucket: int, slots: int
) -> np.ndarray:
    """Packs (slot, row) pairs into i32[height, HEADER + bucket].

    Rows beyond the given ones are padding: their slot is `slots`, which does not exist,
    so the device drops whatever they write.
    """
    packed = np.zeros((height, HEADER + bucket), np.int32)
    packed[:, SLOT], packed[:, LENGTH], packed[:, STOP:HEADER] = slots, 1, -1
    words = packed.view(np.uint32)
    for i, (slot, row) in enumerate(rows):
        length = len(row.prompt)
        packed[i, [SLOT, LENGTH, LIMIT, CHOICE]] = slot, length, row.limit, row.choice
        words[i, [SEED_HIGH, SEED_LOW]] = row.seed
        packed.view(np.float32)[i, TEMPERATURE] = row.temperature
        packed[i, STOP : STOP + len(row.stop_ids)] = row.stop_ids
        packed[i, HEADER : HEADER + length] = row.prompt
    return packed


def buckets(context: int, smallest: int = 16) -> tuple[int, ...]:
    """Padded prompt lengths: powers of two from `smallest`, and the context itself last."""
    sizes = []
    size = smallest
    while size < context:
        sizes.append(size)
        size *= 2
    return (*sizes, context)
