"""A device of plain arrays that checks what it is told to read and write.

A place of a page holds the token and the weight version that were written there. Tokens are
sampled by a hash of seed, choice and position alone, and the route of a token is one of its id
and position, so what a request must get is known beforehand.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forge_jax.config import RolloutConfig
from forge_jax.rollout import packets
from forge_jax.rollout.packets import EXHAUSTED, GOES_ON, IDLE, SCRATCH, STOPPED, Sampled
from forge_jax.rollout.plans import Decode, Plan, Prefill, Results

VOCAB = 50


def drawn(seed: int, choice: int, position: int) -> int:
    """The token at a position."""
    state = 12345
    for value in (seed, choice, position):
        state = (state * 6364136223846793005 + value * 1442695040888963407 + 7) % 2**64
        state ^= state >> 29
    return state % VOCAB


def route(token: Any, position: Any) -> Any:
    return (np.asarray(token) * 31 + np.asarray(position)) % 97


@dataclass
class Row:
    """What a slot is doing."""

    tokens: list[int]
    seed: int
    choice: int
    left: int
    stop_ids: tuple[int, ...]
    active: bool = True


@dataclass
class FakeDevice:
    """Runs plans at once, as `Runner.advance` does in order."""

    rollout: RolloutConfig
    version: int = 0
    mixed: bool = False  # requests may go on with what older weights have computed
    slots: dict[int, Row] = field(default_factory=dict)
    born: dict[Any, int] = field(default_factory=dict)  # version that a stay began with

    def __post_init__(self) -> None:
        shape = (self.rollout.pool_pages, self.rollout.page)
        self.tokens = np.full(shape, -1, np.int64)
        self.versions = np.full(shape, -1, np.int64)

    def run(self, plan: Plan) -> Results:
        routes = tuple(self._prefill(call) for call in plan.prefills)
        block = None if plan.decode is None else self._decode(plan.decode)
        return Results(
            plan=plan, version=self.version, began=0.0, ended=0.0, routes=routes, block=block
        )

    def check(self, stay: Any, table: np.ndarray, tokens: Any) -> None:
        """The first places of a table hold `tokens`, computed since the stay began."""
        count = len(tokens)
        read = self.tokens[table].reshape(-1)[:count]
        np.testing.assert_array_equal(read, tokens)
        versions = self.versions[table].reshape(-1)[:count]
        least = self.born.setdefault(stay, self.version) if self.mixed else self.version
        assert (versions >= least).all(), f"{versions=} of older weights than {least}"

    def _write(self, page: int, place: int, token: int, version: int) -> None:
        assert page != SCRATCH, "a token of a request is lost"
        self.tokens[page, place], self.versions[page, place] = token, version

    def _prefill(self, call: Prefill) -> np.ndarray | None:
        size, page = self.rollout.page, call.shape.pages
        rows = call.packet.shape[0]
        assert rows == self.rollout.chunk // call.shape.tokens
        written: set[int] = set()
        for row, part in zip(call.packet, call.parts, strict=False):
            start, length = int(row[packets.START]), int(row[packets.LENGTH])
            assert (start, length) == (part.start, part.length)
            table = row[packets.PREFILL_HEADER :][:page]
            tokens = row[packets.PREFILL_HEADER + page :][:length]
            known = part.stay.job.tokens
            np.testing.assert_array_equal(tokens, known[start : start + length])
            self.check(part.stay, table, known[:start])
            for position, token in enumerate(tokens.tolist(), start):
                self._write(table[position // size], position % size, token, self.version)
            own = {int(table[p // size]) for p in range(start, start + length)}
            assert not own & written, "two rows write one page"
            written |= own
        assert (call.packet[len(call.parts) :, packets.LENGTH] == 0).all()
        if not self.rollout.routes:
            return None
        routes = np.full((rows, call.shape.tokens, 1, 1), 99, np.int16)
        for row, part in enumerate(call.parts):
            at = np.arange(part.start, part.start + part.length)
            routes[row, : part.length, 0, 0] = route(part.stay.job.tokens[at], at)
        return routes

    def _decode(self, call: Decode) -> Sampled:
        shape, rollout = call.shape, self.rollout
        assert shape in packets.decode_shapes(rollout)
        width = packets.HEADER + shape.own
        wide = call.packet[: shape.rows * width].reshape(shape.rows, width)
        shared = call.packet[shape.rows * width :].reshape(-1, 1 + shape.shared)
        packet = np.zeros((shape.steps, 1, shape.rows, 4), np.int32)
        packet[..., packets.STATUS] = IDLE
        routes = np.full((shape.steps, 1, shape.rows, 1, 1), 99, np.int16)
        touched: list[tuple[set[int], set[int]]] = []
        for slot in range(shape.rows):
            stay = call.owners[slot]
            assert (wide[slot, packets.STATE] == packets.EMPTY) == (stay is None)
            if stay is None:
                continue
            bundle = shared[slot // rollout.bundle]
            before = bundle[1 : 1 + bundle[0]]
            row = self._row(slot, wide[slot], stay)
            table = np.concatenate([before, wide[slot, packets.HEADER :]])
            touched.append(
                self._steps(row, table, len(before), stay, packet[:, 0, slot], routes, slot)
            )
        for index, (writes, _) in enumerate(touched):
            for other, (_, reads) in enumerate(touched):
                assert index == other or not writes & reads, "a row writes what another reads"
        return Sampled(packet, routes if rollout.routes else None)

    def _row(self, slot: int, header: np.ndarray, stay: Any) -> Row:
        if header[packets.STATE] == packets.FRESH:
            position = int(header[packets.POSITION])
            tokens = stay.job.tokens[: position + 1].tolist()
            assert tokens[-1] == header[packets.TOKEN]
            stops = header[packets.STOP : packets.STOP + packets.STOP_IDS]
            self.slots[slot] = Row(
                tokens=tokens,
                seed=int(header[packets.SEED_LOW]),
                choice=int(header[packets.CHOICE]),
                left=int(header[packets.LIMIT]),
                stop_ids=tuple(int(stop) for stop in stops if stop >= 0),
            )
        return self.slots[slot]

    def _steps(
        self,
        row: Row,
        table: np.ndarray,
        before: int,
        stay: Any,
        packet: np.ndarray,
        routes: np.ndarray,
        slot: int,
    ) -> tuple[set[int], set[int]]:
        """A block of one row; pages that it writes and reads."""
        size = self.rollout.page
        first = len(row.tokens) - 1
        assert first >= before * size, "a row writes to what its bundle reads"
        self.check(stay, table, row.tokens[:first])
        view = self.tokens[table].reshape(-1).copy(), self.versions[table].reshape(-1).copy()
        for step in range(len(packet)):
            position = len(row.tokens) - 1
            view[0][position], view[1][position] = row.tokens[-1], self.version
            if not row.active:
                continue
            routes[step, 0, slot] = route(row.tokens[-1], position)
            token = drawn(row.seed, row.choice, position + 1)
            row.tokens.append(token)
            row.left -= 1
            stopped = token in row.stop_ids
            row.active = not stopped and row.left > 0
            status = GOES_ON if row.active else STOPPED if stopped else EXHAUSTED
            packet[step, [packets.SAMPLED, packets.STATUS]] = token, status
        last = min(first + len(packet), len(table) * size)
        for position in range(first, last):
            page, place = table[position // size], position % size
            if page != SCRATCH:
                self._write(page, place, view[0][position], view[1][position])
        fed = len(row.tokens) - 1
        assert all(table[p // size] != SCRATCH for p in range(first, fed)), "a token is lost"
        pages = {int(table[p // size]) for p in range(first, last)} - {SCRATCH}
        return pages, {int(page) for page in table} - {SCRATCH}
