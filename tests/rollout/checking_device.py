"""A device that keeps tokens in its pages in place of keys and values, and checks who reads what.

Plans flow in, results flow out, as from a `Runner`. It asserts that a call reads of every row's
table exactly the row's own sequence, as weights of one version wrote it unless it runs on across
an update, and that nobody writes to what another still reads.
"""

from typing import Any

import numpy as np

from forge_jax.config import RolloutConfig
from forge_jax.rollout import packets
from forge_jax.rollout.jobs import Stay
from forge_jax.rollout.packets import Sampled
from forge_jax.rollout.plans import Decode, Plan, Prefill, Results
from forge_jax.rollout.scheduler import Scheduler

VOCAB = 50
NOTHING = -1


def slot_of(row: int, rows: int, rollout: RolloutConfig) -> int:
    """The slot of a row, see `row_of`."""
    place, seat = divmod(row, rows // rollout.dealt)
    return place * rollout.place_slots + seat


def drawn(seed: int, choice: int, position: int) -> int:
    """The token that any request of this seed and choice has at a position."""
    return hash((seed, choice, position, 7)) % VOCAB


class FakeDevice:
    """Pages of (token, version); slots of (token, position, left, seed, choice, stops)."""

    def __init__(self, cfg: RolloutConfig, scheduler: Scheduler):
        self.version = 0
        self._cfg = cfg
        self._scheduler = scheduler
        shape = (cfg.pool_pages, cfg.page)
        self.tokens = np.full(shape, NOTHING)
        self.versions = np.full(shape, NOTHING)
        self._slots: list[list[Any]] = [[0, 0, 0, 0, 0, (), False] for _ in range(cfg.slots)]
        # What each page held when it entered the tree: it must not change as long as it is there.
        self._sealed: dict[int, tuple[Any, np.ndarray]] = {}

    def run(self, plan: Plan, began: float) -> Results:
        self._unseal()
        routes = tuple(self._prefill(call) for call in plan.prefills)
        scores = tuple(self._scores(call) for call in plan.prefills)
        block = None if plan.decode is None else self._decode(plan.decode)
        self._seal(plan)
        return Results(
            plan=plan,
            version=self.version,
            began=began,
            ended=began,
            routes=routes,
            scores=scores,
            block=block,
        )

    def _prefill(self, call: Prefill) -> Any:
        cfg, shape = self._cfg, call.shape
        rows = cfg.chunk // shape.tokens * cfg.dealt
        width = packets.PREFILL_HEADER + shape.pages + shape.tokens + shape.scored
        assert call.packet.shape == (rows, width)
        routes = np.full((rows, shape.tokens, 1, 1), 99, np.int8)
        parts = {part.row: part for part in call.parts}
        for index, row in enumerate(call.packet):
            slot, start, length = (int(x) for x in row[: packets.PREFILL_HEADER])
            if slot == cfg.slots:
                assert index not in parts
                continue
            table = row[packets.PREFILL_HEADER :][: shape.pages]
            tokens = row[packets.PREFILL_HEADER + shape.pages :][:length]
            part = parts[index]
            assert index // (rows // cfg.dealt) == slot // cfg.place_slots, "beside its place"
            self._reads(table, part.stay, start)
            np.testing.assert_array_equal(tokens, part.stay.job.tokens[start : start + length])
            for place, token in enumerate(tokens, start):
                self._write(table, place, int(token))
                routes[index, place - start] = token
        return routes if cfg.routes else None

    def _scores(self, call: Prefill) -> packets.Scores | None:
        """Of each next token: the version, itself, and thrice the token before it."""
        shape = call.shape
        if not shape.scored:
            return None
        tokens = call.packet[:, packets.PREFILL_HEADER + shape.pages :]
        fed, following = tokens[:, :-1], tokens[:, 1:]
        versions = np.full(fed.shape, self.version, np.float32)
        return packets.Scores(versions, following, np.stack([fed] * 3, -1), np.stack([fed] * 3, -1))

    def _decode(self, call: Decode) -> Sampled:
        cfg, shape = self._cfg, call.shape
        width = packets.HEADER + shape.own
        wide = call.packet[: shape.rows * width].reshape(shape.rows, width)
        shared = call.packet[shape.rows * width :].reshape(-1, 1 + shape.shared)
        out = np.zeros((shape.steps, 1, shape.rows, 4), np.int32)
        routes = np.full((shape.steps, 1, shape.rows, 1, 1), 99, np.int8)
        for index, row in enumerate(wide):
            stay, slot = call.owners[index], slot_of(index, shape.rows, cfg)
            assert (row[packets.STATE] == packets.EMPTY) == (stay is None)
            if stay is None:
                self._slots[slot][-1] = False
                continue
            if row[packets.STATE] == packets.FRESH:
                stops = tuple(int(x) for x in row[packets.STOP : packets.HEADER] if x >= 0)
                self._slots[slot] = [
                    *(int(row[x]) for x in (packets.TOKEN, packets.POSITION, packets.LIMIT)),
                    *(int(row[x]) for x in (packets.SEED_LOW, packets.CHOICE)),
                    stops,
                    True,
                ]
            assert slot == stay.slot
            count, *common = (int(x) for x in shared[index // (shape.rows // len(shared))])
            table = np.array([*common[:count], *row[packets.HEADER :]])
            assert self._slots[slot][1] < len(table) * cfg.page
            self._reads(table, stay, self._slots[slot][1])
            for step in range(shape.steps):
                self._step(slot, table, out[step, 0, index], routes[step, 0, index])
        return Sampled(out, routes if cfg.routes else None)

    def _step(self, slot: int, table: np.ndarray, out: np.ndarray, routes: np.ndarray) -> None:
        token, position, left, seed, choice, stops, active = self._slots[slot]
        if not active:
            return
        self._write(table, position, token)
        routes[:] = token
        token, left = drawn(seed, choice, position + 1), left - 1
        status = packets.GOES_ON
        if token in stops:
            status = packets.STOPPED
        elif left == 0:
            status = packets.EXHAUSTED
        goes_on = status == packets.GOES_ON
        self._slots[slot] = [token, position + 1, left, seed, choice, stops, goes_on]
        out[packets.SAMPLED], out[packets.STATUS] = token, status

    def _reads(self, table: np.ndarray, stay: Stay, count: int) -> None:
        """The first `count` tokens of a table are those of the stay's sequence, at its place."""
        places = {int(page) // self._cfg.place_pages for page in table if page != packets.SCRATCH}
        assert places <= {stay.slot // self._cfg.place_slots}
        held = self.tokens[table[: -(-count // self._cfg.page)]].reshape(-1)[:count]
        known = min(count, stay.job.length)
        np.testing.assert_array_equal(held[:known], stay.job.tokens[:known])
        seed, choice, prompt = stay.job.fresh.seed[1], stay.job.fresh.choice, stay.job.prompt
        for position in range(known, count):  # what was sampled and is not read yet
            assert position >= prompt
            assert held[position] == drawn(seed, choice, position)
        by = self.versions[table[: -(-count // self._cfg.page)]].reshape(-1)[:count]
        assert not stay.publishes or not self._cfg.prefix_cache or set(by) <= {self.version}
        found = self.versions[[node.page for node in stay.nodes[: stay.found]]]
        assert len({*found.reshape(-1)}) <= 1, "a prefix of several versions"

    def _write(self, table: np.ndarray, position: int, token: int) -> None:
        page = int(table[position // self._cfg.page])
        assert page != packets.SCRATCH, f"position {position} has no page"
        place = position % self._cfg.page
        if page in self._sealed:
            node, _ = self._sealed[page]
            assert self._gone(node), f"page {page} is in the tree and is written"
            del self._sealed[page]
        self.tokens[page, place], self.versions[page, place] = token, self.version

    def _seal(self, plan: Plan) -> None:
        for call in plan.prefills:
            for part in call.parts:
                for _, node in part.published:
                    if not self._gone(node):
                        self._sealed[node.page] = (node, self.tokens[node.page].copy())

    def _unseal(self) -> None:
        for page, (node, was) in list(self._sealed.items()):
            if self._gone(node):
                del self._sealed[page]
            else:
                np.testing.assert_array_equal(self.tokens[page], was)

    def _gone(self, node: Any) -> bool:
        memory = self._scheduler.places.all[node.page // self._cfg.place_pages]
        return memory.tree.get(node.key) is not node
