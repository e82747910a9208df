"""Programs with drafts sample what they sample without any, and modules that draft know what they
would of the whole sequence."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from test_drafting import CFG, MOE, guesses_of

from forge_jax.config import RolloutConfig
from forge_jax.models import layout
from forge_jax.models.config import ModelConfig
from forge_jax.rollout import packets, programs
from forge_jax.rollout.access import places_of
from forge_jax.rollout.cache import beside, empty_pool, pool_sharding
from forge_jax.rollout.fitting import over_places
from forge_jax.rollout.modules import Drafting
from forge_jax.rollout.ngram import NOTHING
from forge_jax.rollout.packets import DecodeRow, DecodeShape, Fresh, PrefillShape, Span
from forge_jax.rollout.slots import empty_slots
from forge_jax.rollout.speculation import empty_drafter
from forge_jax.sharding import automatic, make_mesh, mesh_of, shardings

SIZES = RolloutConfig(slots=4, context=40, page=4, chunk=16, decode_steps=3)
OFF, MTP, NGRAM = (
    dataclasses.replace(SIZES, speculate=kind, drafts=3) for kind in ("off", "mtp", "ngram")
)
PAGES = 48
# Of two places with half of the slots and pages each, or of one.
TABLES = [[24 * (slot // 2) + 10 * (slot % 2) + i for i in range(1, 11)] for slot in range(4)]
PROMPTS = (1, 9, 15, 2)  # lengths; at 9 the page before the newest token is full


class Device:
    """A pool, slots and a drafter, and the programs that change them."""

    def __init__(
        self,
        rollout: RolloutConfig,
        cfg: ModelConfig,
        params: Any,
        mesh: Mesh | None = None,
        attention: str = "xla",
    ) -> None:
        if mesh is not None:
            params = jax.device_put(
                params, jax.tree.map(automatic, shardings(layout.layout(cfg), mesh))
            )
        self.rollout = over_places(dataclasses.replace(rollout, pages=PAGES), places_of(mesh))
        self.weights = programs.publish(params, cfg=cfg, modules=rollout.modules)
        where = pool_sharding(self.weights["embed"].sharding, cfg, self.rollout.dealt)
        sizes = (PAGES, rollout.page, np.float32, where, rollout.modules)
        self.pool = empty_pool(cfg, *sizes)
        self.slots = jax.device_put(empty_slots(rollout.slots), beside(where))
        self.drafter = empty_drafter(self.rollout, cfg, np.float32, where)
        self.static = {"cfg": cfg, "attention": attention, "mesh": mesh_of(self.weights)}

    def prefill(self, *spans: Span) -> None:
        shape = PrefillShape(tokens=4, pages=10, places=self.rollout.dealt)
        packet = packets.pack_prefill(spans, shape, self.rollout)
        self.pool, self.drafter, _ = programs.prefill(
            self.weights, self.pool, self.drafter, packet, shape=shape, **self.static
        )

    def decode(
        self,
        rows: list[DecodeRow],
        drafts: int,
        bundles: list[list[int]] | None = None,
        routes: bool = False,
    ) -> Any:
        shared = 10 if bundles else 0
        steps = self.rollout.decode_steps
        shape = DecodeShape(
            rows=4, shared=shared, own=10, steps=steps, drafts=drafts, places=self.rollout.dealt
        )
        packet = packets.pack_decode(rows, bundles or [], shape, self.rollout)
        self.pool, self.slots, self.drafter, result = programs.decode(
            self.weights, self.pool, self.slots, self.drafter, packet,
            shape=shape, routes=routes, **self.static,
        )  # fmt: skip
        return jax.device_get(result)


def parameters(cfg: ModelConfig) -> Any:
    return layout.init(cfg, jax.random.key(4))


def prompt(slot: int) -> np.ndarray:
    return np.random.default_rng(slot).integers(0, CFG.vocab, PROMPTS[slot]).astype(np.int32)


def fresh(slot: int, temperature: float, stop: int, rollout: RolloutConfig) -> Fresh:
    tokens, said = prompt(slot), None
    if rollout.speculate == "ngram":
        said = np.full(2 * rollout.context, NOTHING, np.int32)
        said[rollout.context : rollout.context + len(tokens)] = tokens
    return Fresh(
        token=int(tokens[-1]),
        limit=40 - len(tokens) - 4 * (slot == 1),
        seed=(0, slot),
        choice=0,
        temperature=temperature,
        stop_ids=(stop,),
        said=said,
    )


def read(device: Device) -> None:
    """All prompts but their last tokens, in chunks."""
    for start in range(0, max(PROMPTS), 4):
        spans = [
            Span(slot=i, start=start, tokens=prompt(i)[start : min(start + 4, n - 1)], table=t)
            for i, (n, t) in enumerate(zip(PROMPTS, TABLES, strict=True))
            if start < n - 1
        ]
        device.prefill(*spans)


def played(
    device: Device, depths: list[int], temperature: float = 1.0, stop: int = -1
) -> tuple[list[list[tuple[int, float]]], int]:
    """What every row says, with log-probs, and in how many calls; depths take turns."""
    read(device)
    said: list[list[tuple[int, float]]] = [[] for _ in PROMPTS]
    calls = 0
    while True:
        rows = [
            DecodeRow(
                slot=slot,
                position=n - 1,
                fresh=None if calls else fresh(slot, temperature, stop, device.rollout),
                table=TABLES[slot],
            )
            for slot, n in enumerate(PROMPTS)
        ]
        packet = device.decode(rows, depths[calls % len(depths)]).packet
        flat = packet.reshape(-1, *packet.shape[2:])  # [K W, B, 4]
        drawn = flat[..., packets.STATUS] != packets.IDLE
        if not drawn.any():
            return said, calls
        logp = np.ascontiguousarray(flat[..., packets.LOGP]).view(np.float32)
        for slot, row in enumerate(said):
            here = drawn[:, slot]
            row += zip(flat[here, slot, 0].tolist(), logp[here, slot].tolist(), strict=True)
        calls += 1


@pytest.fixture(scope="module")
def off() -> Any:
    """What is said without drafts, by model, temperature and stop id."""
    known: dict[Any, Any] = {}

    def get(cfg: ModelConfig, temperature: float, stop: int) -> Any:
        key = (cfg, temperature, stop)
        if key not in known:
            known[key] = played(Device(OFF, cfg, parameters(cfg)), [0], temperature, stop)
        return known[key]

    return get


SETTINGS = [
    (CFG, 0.0, -1, MTP, [3]),
    (CFG, 1.0, 5, MTP, [0, 2, 3, 1]),
    (CFG, 0.7, -1, NGRAM, [0, 2]),
    (CFG, 0.0, -1, NGRAM, [3]),
    (MOE, 1.0, -1, MTP, [2]),
    (MOE, 1.0, -1, NGRAM, [3]),
]


@pytest.mark.parametrize(("cfg", "temperature", "stop", "rollout", "depths"), SETTINGS)
def test_drafts_change_no_token(
    off: Any,
    cfg: ModelConfig,
    temperature: float,
    stop: int,
    rollout: RolloutConfig,
    depths: list[int],
) -> None:
    expected, slow = off(cfg, temperature, stop)
    said, calls = played(Device(rollout, cfg, parameters(cfg)), depths, temperature, stop)
    for row, wanted in zip(said, expected, strict=True):
        assert [t for t, _ in row] == [t for t, _ in wanted]
        np.testing.assert_allclose([p for _, p in row], [p for _, p in wanted], atol=1e-5)
    assert calls <= slow
    if stop < 0:
        assert [len(row) for row in said] == [39, 27, 25, 38]
    else:
        assert min(len(row) for row in said) < 25


@pytest.mark.parametrize(
    ("rollout", "attention"), [(MTP, "xla"), (NGRAM, "xla")], ids=["modules", "text"]
)
def test_drafts_change_no_token_at_two_places(
    off: Any, rollout: RolloutConfig, attention: str
) -> None:
    """Which have pages, and tails of them, of their own."""
    expected, _ = off(CFG, 1.0, -1)
    device = Device(rollout, CFG, parameters(CFG), make_mesh(fsdp=2), attention)
    before = [x.sharding for x in jax.tree.leaves((device.slots, device.drafter))]
    said, _ = played(device, [3])
    after = jax.tree.leaves((device.slots, device.drafter))
    assert all(x.sharding.is_equivalent_to(y, x.ndim) for x, y in zip(after, before, strict=True))
    for row, wanted in zip(said, expected, strict=True):
        assert [t for t, _ in row] == [t for t, _ in wanted]
        np.testing.assert_allclose([p for _, p in row], [p for _, p in wanted], atol=1e-4)
    dealt = [*jax.tree.leaves(device.pool)]
    if isinstance(device.drafter, Drafting):
        dealt.append(device.drafter.tails)
    assert {shard.data.shape[0] for x in dealt for shard in x.addressable_shards} == {PAGES // 2}


def test_earlier_text_saves_calls(off: Any) -> None:
    """A greedy row of a small model repeats itself, and what it repeats is drafted."""
    _, slow = off(CFG, 0.0, -1)
    assert played(Device(NGRAM, CFG, parameters(CFG)), [3], 0.0)[1] < slow


def test_modules_guess_what_they_would_after_the_whole_sequence() -> None:
    """Also where a prefix was read by another request, and where rows read it together."""
    params = parameters(CFG)
    device = Device(MTP, CFG, params)
    tokens, table = prompt(2), TABLES[2]
    for start in range(0, 14, 4):
        device.prefill(
            Span(slot=2, start=start, tokens=tokens[start : min(start + 4, 14)], table=table)
        )
    known = {2: tokens, 3: np.append(tokens[:12], 7).astype(np.int32), 1: tokens[:9]}
    tables = {2: table, 3: [*table[:3], *TABLES[3]][:10], 1: [*table[:2], *TABLES[1]][:10]}
    shared = table[:2]
    for call in range(3):
        rows = [
            DecodeRow(
                slot=slot,
                position=len(ids) - 1,
                fresh=None
                if call
                else dataclasses.replace(
                    fresh(slot, 0.0, -1, MTP), token=int(ids[-1]), limit=40 - len(ids)
                ),
                table=tables[slot][len(shared) :],
            )
            for slot, ids in known.items()
        ]
        packet = device.decode(rows, 3, [shared]).packet
        flat = packet.reshape(-1, *packet.shape[2:])
        for slot in known:
            here = flat[flat[:, slot, packets.STATUS] != packets.IDLE, slot]
            known[slot] = np.append(known[slot], here[:, packets.SAMPLED]).astype(np.int32)
            if len(known[slot]) < 38:
                drafts = np.asarray(device.drafter.drafts)[slot].tolist()
                assert drafts == guesses_of(params, known[slot], CFG), (call, slot)
