"""Where requests go when a mesh's places have slots and pages of their own."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from checking_device import VOCAB, slot_of
from hosted import Host

from forge_jax.config import RolloutConfig
from forge_jax.rollout.packets import decode_shapes, prefill_shapes
from forge_jax.rollout.rows import row_of

TWO = RolloutConfig(slots=16, context=64, page=4, chunk=16, decode_steps=3, places=2)


def text(seed: int, size: int, *own: int) -> np.ndarray:
    shared = np.random.default_rng(seed).integers(2, VOCAB, size)
    return np.array([*shared, *own], np.int32)


def seats(host: Host) -> dict[int, int]:
    """The place of every running request."""
    return {number: stay.place for number, stay in host.scheduler._stays.items()}


def ended(host: Host) -> None:
    host.finish()
    host.check()
    host.idle()


def test_a_group_meets_at_one_place_and_computes_its_prefix_once() -> None:
    host = Host(TWO)
    for number in range(16):
        host.submit(text(number % 2, 40, 2 + number, 3, 4), seed=number, ignore_eos=True)
    while host.scheduler.running < 16:
        host.round()
    found = seats(host)
    assert len({found[number] for number in range(0, 16, 2)}) == 1
    assert Counter(found.values()) == {0: 8, 1: 8}
    ended(host)
    assert host.scheduler.counts["prefill_tokens"] == 2 * 40 + 16 * 2


def test_a_group_with_more_than_a_place_has_slots_spreads() -> None:
    host = Host(TWO)
    for number in range(16):
        host.submit(text(0, 40, 2 + number, 3, 4), seed=number, ignore_eos=True)
    while host.scheduler.running < 16:
        host.round()
    ended(host)
    assert host.scheduler.counts["prefill_tokens"] == 2 * 40 + 16 * 2


def test_requests_with_nothing_in_common_are_dealt_evenly() -> None:
    host = Host(TWO)
    for number in range(6):
        host.submit(text(number, 9), seed=number, ignore_eos=True)
    host.round()
    assert Counter(seats(host).values()) == {0: 3, 1: 3}
    ended(host)


def test_a_conversation_goes_where_it_was_unless_that_place_is_busier_than_it_is_worth() -> None:
    """Five pages in common are worth five more requests than a bundle of eight."""
    cfg = dataclasses.replace(TWO, slots=64)
    for more, place in ((12, 1), (13, 0), (31, 0)):
        host = Host(cfg)
        host.submit(text(7, 9), ignore_eos=True)  # at place 0
        talk = host.submit(text(0, 22), max_tokens=1)
        host.round()
        assert seats(host) == {0: 0, talk: 1}
        while talk in seats(host):
            host.round()
        running = host.scheduler.places.running
        running[1] += 1 + more
        again = host.submit(text(0, 22, 5, 6), ignore_eos=True)
        host.scheduler._admit()
        running[1] -= 1 + more
        assert seats(host)[again] == place
        ended(host)
        assert host.chunks[again][0].cached_tokens == (20 if place else 0)


def test_pages_are_rounded_up_and_slots_must_divide() -> None:
    cfg = RolloutConfig(slots=8, context=16, page=4, chunk=8, pages=27, places=4)
    assert (cfg.place_pages, cfg.pool_pages) == (7, 28)
    with pytest.raises(ValueError, match="slots=8 must be a multiple of places=3"):
        RolloutConfig(slots=8, places=3)
    with pytest.raises(ValueError, match=r"pages=20 must be above 20, for .* at every place"):
        RolloutConfig(slots=8, context=16, page=4, chunk=8, pages=20, places=4)


def test_rows_of_a_call_are_whole_bundles_of_every_place() -> None:
    cfg = RolloutConfig(slots=64, context=64, page=8, chunk=32, places=2)
    assert cfg.bundle == 8
    assert {shape.rows for shape in decode_shapes(cfg)} == {16, 64}
    for rows in (16, 64):
        slots = [slot_of(row, rows, cfg) for row in range(rows)]
        assert slots == [*range(rows // 2), *range(32, 32 + rows // 2)]
        assert [row_of(slot, rows, cfg) for slot in slots] == [*range(rows)]
    assert {shape.places for shape in (*decode_shapes(cfg), *prefill_shapes(cfg))} == {2}
