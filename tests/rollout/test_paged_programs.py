"""Programs over pages compute what the model does on the whole sequence."""

import jax
import numpy as np
import pytest
from small_engine import SMALL, log_softmax, teacher_logits, weights

from forge_jax.config import RolloutConfig
from forge_jax.models.layout import layout
from forge_jax.rollout import moving, packets, programs
from forge_jax.rollout.cache import empty_pool, pool_sharding
from forge_jax.rollout.packets import (
    DecodeRow,
    DecodeShape,
    Fresh,
    PrefillShape,
    Span,
    pack_decode,
    pack_prefill,
)
from forge_jax.rollout.slots import empty_slots
from forge_jax.sharding import automatic, make_mesh, mesh_of, replicated, shardings

ROLLOUT = RolloutConfig(slots=4, context=32, page=4, chunk=16, decode_steps=3)
WHOLE = PrefillShape(tokens=16, pages=8)
PARTS = PrefillShape(tokens=4, pages=8)
APART = DecodeShape(rows=4, shared=0, own=8, steps=3, drafts=0)
TOGETHER = DecodeShape(rows=4, shared=8, own=8, steps=3, drafts=0)
PAGES = 40
LENGTH = 15  # of the prompt; its last token is fed by the first step


def fresh(token: int, seed: int, limit: int = 9) -> Fresh:
    return Fresh(token=token, limit=limit, seed=(0, seed), choice=0, temperature=1.0, stop_ids=())


class Device:
    """A pool and slots, and the programs that change them."""

    def __init__(self) -> None:
        self.weights = programs.publish(weights(), cfg=SMALL)
        where = self.weights["embed"].sharding
        self.pool = empty_pool(SMALL, PAGES, ROLLOUT.page, np.float32, where)
        self.slots = empty_slots(ROLLOUT.slots)

    def prefill(self, shape: PrefillShape, *spans: Span) -> None:
        packet = pack_prefill(spans, shape, ROLLOUT)
        self.pool, *_ = programs.prefill(
            self.weights, self.pool, None, packet, cfg=SMALL, shape=shape
        )

    def decode(
        self, shape: DecodeShape, rows: list[DecodeRow], bundles: list[list[int]] | None = None
    ) -> np.ndarray:
        packet = pack_decode(rows, bundles or [], shape, ROLLOUT)
        self.pool, self.slots, _, result = programs.decode(
            self.weights, self.pool, self.slots, None, packet, cfg=SMALL, shape=shape
        )
        return np.asarray(result.packet)[:, 0]  # [K, B, 4]

    def page(self, index: int) -> np.ndarray:
        return np.asarray(moving.export(self.pool, None, np.array([index])).kv)[0]


def prompt(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SMALL.vocab, LENGTH).astype(np.int32)


def span(tokens: np.ndarray, table: list[int], start: int = 0, stop: int = LENGTH - 1) -> Span:
    return Span(slot=0, start=start, tokens=tokens[start:stop], table=table)


def logps(result: np.ndarray, slot: int) -> np.ndarray:
    return np.ascontiguousarray(result[:, slot, packets.LOGP]).view(np.float32)


TABLES = [[1 + 8 * slot + i for i in range(8)] for slot in range(4)]


@pytest.fixture(scope="module")
def alone() -> tuple[np.ndarray, np.ndarray]:
    """Two blocks of one request on an empty device: tokens and log-probs."""
    return decoded(Device(), WHOLE, 0)


def decoded(device: Device, shape: PrefillShape, slot: int) -> tuple[np.ndarray, np.ndarray]:
    tokens, table = prompt(0), TABLES[slot]
    for start in range(0, LENGTH - 1, shape.tokens):
        device.prefill(shape, span(tokens, table, start, min(LENGTH - 1, start + shape.tokens)))
    first = device.decode(APART, [row(slot, tokens, table)])
    then = device.decode(APART, [DecodeRow(slot=slot, position=0, fresh=None, table=table)])
    both = np.concatenate([first, then])
    return both[:, slot, packets.SAMPLED], logps(both, slot)


def row(
    slot: int, tokens: np.ndarray, table: list[int], shared: int = 0, seed: int = 5
) -> DecodeRow:
    return DecodeRow(
        slot=slot, position=LENGTH - 1, fresh=fresh(int(tokens[-1]), seed), table=table[shared:]
    )


def test_decoding_is_the_model_on_the_whole_sequence(alone):
    sampled, logp = alone
    tokens = [*prompt(0).tolist(), *sampled.tolist()]
    rows = log_softmax(teacher_logits(weights(), tokens)[LENGTH - 1 : -1])
    np.testing.assert_allclose(logp, rows[np.arange(6), sampled], atol=1e-5)


def test_prefill_in_chunks_is_prefill(alone):
    sampled, logp = decoded(Device(), PARTS, 0)
    assert sampled.tolist() == alone[0].tolist()
    np.testing.assert_allclose(logp, alone[1], atol=1e-5)


def test_neither_slot_nor_neighbours_change_a_bit(alone):
    device = Device()
    for slot in (0, 1, 3):
        device.prefill(WHOLE, span(prompt(slot + 7), TABLES[slot]))
    device.decode(APART, [row(slot, prompt(slot + 7), TABLES[slot]) for slot in (0, 1, 3)])
    sampled, logp = decoded(device, WHOLE, 2)
    assert sampled.tolist() == alone[0].tolist()
    assert logp.tolist() == alone[1].tolist()


def test_what_a_bundle_shares_is_read_as_if_each_row_had_it():
    """Three rows of one prefix of three pages beside an empty one."""
    device, tokens = Device(), prompt(0)
    others = {slot: [*TABLES[0][:3], *TABLES[slot][3:]] for slot in (1, 3)}
    tables = {0: TABLES[0], **others}
    device.prefill(WHOLE, span(tokens, TABLES[0]))
    for table in others.values():
        device.prefill(PARTS, span(tokens, table, 12))
    pool, slots = jax.tree.map(np.asarray, device.pool), device.slots
    apart = device.decode(APART, [row(s, tokens, t, seed=s) for s, t in tables.items()])
    device.pool, device.slots = jax.tree.map(jax.numpy.asarray, pool), empty_slots(4)
    together = device.decode(
        TOGETHER, [row(s, tokens, t, 3, s) for s, t in tables.items()], [TABLES[0][:3]]
    )
    for slot in tables:
        assert together[:, slot, 0].tolist() == apart[:, slot, 0].tolist()
        np.testing.assert_allclose(logps(together, slot), logps(apart, slot), atol=1e-5)
    assert slots is not None
    assert (together[:, 2, packets.STATUS] == packets.IDLE).all()


def test_a_row_that_is_not_in_the_packet_writes_nothing():
    device = Device()
    device.prefill(WHOLE, span(prompt(0), TABLES[0]))
    device.decode(APART, [row(0, prompt(0), TABLES[0])])
    before = [device.page(index) for index in TABLES[0]]
    device.prefill(WHOLE, span(prompt(1), TABLES[1]))
    result = device.decode(APART, [row(1, prompt(1), TABLES[1])])
    assert (result[:, 0, packets.STATUS] == packets.IDLE).all()
    for index, kept in zip(TABLES[0], before, strict=True):
        np.testing.assert_array_equal(device.page(index), kept)


def test_pages_are_written_where_the_table_says():
    device = Device()
    device.prefill(WHOLE, span(prompt(0), TABLES[0]))
    device.decode(APART, [row(0, prompt(0), TABLES[0])])
    held = [index for index in range(1, PAGES) if device.page(index).any()]
    assert held == TABLES[0][: -(-(LENGTH + 2) // ROLLOUT.page)]


def test_pages_move(alone):
    """Exported and put into other pages of another device they are the same prefix."""
    there, here = Device(), Device()
    there.prefill(WHOLE, span(prompt(0), TABLES[0]))
    data = moving.export(there.pool, None, np.array(TABLES[0][:3]))
    moved = [30, 20, 10]
    here.pool, _ = moving.ingest(here.pool, None, np.array(moved), data)
    table = [*moved, *TABLES[0][3:]]
    here.prefill(PARTS, span(prompt(0), table, 12))
    result = here.decode(APART, [row(0, prompt(0), table)])
    assert result[:, 0, 0].tolist() == alone[0][:3].tolist()
    np.testing.assert_allclose(logps(result, 0), alone[1][:3], atol=1e-5)


@pytest.mark.parametrize("axes", [{}, {"tensor": 2}, {"data": 2, "tensor": 2}])
def test_pages_read_where_they_are_are_pages_gathered(axes: dict[str, int]) -> None:
    """By the kernel for TPU, interpreted; on a mesh each device reads its own heads, and the
    pages of its place."""
    places = axes.get("data", 1)
    rollout = RolloutConfig(
        slots=4, context=32, page=8, chunk=16, decode_steps=3, pages=12, places=places
    )
    prefix, shape = (
        PrefillShape(tokens=16, pages=4, places=places),
        DecodeShape(rows=4, shared=4, own=4, steps=3, drafts=0, places=places),
    )
    tokens, tables, bundles = prompt(0), {0: [1, 2, 3], 3: [1, 5, 6]}, [[1]]
    if places == 2:
        tables, bundles = {0: [1, 2, 3], 3: [7, 8, 9]}, [[1], [7]]
    taken, where = weights(), None
    if axes:
        placed = shardings(layout(SMALL), make_mesh(**axes))
        taken = jax.device_put(taken, jax.tree.map(automatic, placed))
    taken = programs.publish(taken, cfg=SMALL)
    mesh, where = mesh_of(taken), pool_sharding(taken["embed"].sharding, SMALL, places)
    found = {}
    for attention in ("xla", "pallas"):
        pool = empty_pool(SMALL, 12, rollout.page, np.float32, where)
        slots = jax.device_put(empty_slots(4), replicated(where))
        spans = [
            Span(slot=slot, start=0, tokens=tokens[:-1], table=table)
            for slot, table in tables.items()
        ]
        for given in spans:
            packet = pack_prefill([given], prefix, rollout)
            pool, *_ = programs.prefill(
                taken, pool, None, packet, cfg=SMALL, shape=prefix, attention=attention, mesh=mesh
            )
        rows = [row(slot, tokens, table, 1, slot) for slot, table in tables.items()]
        packet = pack_decode(rows, bundles, shape, rollout)
        pool, slots, _, result = programs.decode(
            taken, pool, slots, None, packet, cfg=SMALL, shape=shape, attention=attention, mesh=mesh
        )
        found[attention] = np.asarray(result.packet)[:, 0], jax.tree.map(np.asarray, pool)
    for slot in tables:
        one, other = (result[:, slot] for result, _ in found.values())
        assert one[:, packets.SAMPLED].tolist() == other[:, packets.SAMPLED].tolist()
        for column in (packets.LOGP, packets.RAW):
            a, b = (np.ascontiguousarray(x[:, column]).view(np.float32) for x in (one, other))
            np.testing.assert_allclose(a, b, atol=1e-5)
    for x, y in zip(*(jax.tree.leaves(pool) for _, pool in found.values()), strict=True):
        written = [page for page in range(12) if page % rollout.place_pages]
        np.testing.assert_allclose(x[written], y[written], atol=1e-5)
