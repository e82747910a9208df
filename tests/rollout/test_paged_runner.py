"""A runner: what is compiled before the first plan, pages that move, and bits that stay."""

import dataclasses

import numpy as np
import pytest
from small_engine import SMALL, prompt, weights

from forge_jax.config import RolloutConfig
from forge_jax.rollout import packets, programs
from forge_jax.rollout.moving import MOVED
from forge_jax.rollout.packets import (
    SCRATCH,
    DecodeRow,
    Fresh,
    Span,
    decode_shapes,
    pack_decode,
    pack_prefill,
    prefill_shapes,
)
from forge_jax.rollout.plans import Decode, Plan, Prefill
from forge_jax.rollout.runner import Runner
from forge_jax.rollout.tiers.payload import Page, parts_of

ROLLOUT = RolloutConfig(slots=2, context=24, page=4, chunk=8, decode_steps=2)
STRICT = dataclasses.replace(ROLLOUT, deterministic=True)
TABLE = [3, 1, 4, 9, 5, 2]  # of a whole sequence
OTHERS = [6, 7, 8, 10, 11, 12]
LENGTH = 14  # of a prompt; its last token is fed by the first step


def started(rollout: RolloutConfig) -> Runner:
    runner = Runner(SMALL, rollout, version=0)
    runner.start(weights())
    return runner


def read(runner: Runner, rollout: RolloutConfig, *spans: Span) -> None:
    """Runs a prefill call of the largest shape."""
    shape = prefill_shapes(rollout)[-1]
    call = Prefill(shape=shape, packet=pack_prefill(spans, shape, rollout), parts=())
    runner.advance(Plan(prefills=(call,), decode=None), None, hold=False)


def sampled(runner: Runner, rollout: RolloutConfig, row: DecodeRow) -> np.ndarray:
    """i32[K, 4]: what a decode call of the largest shape that shares nothing gives a row."""
    shape = [each for each in decode_shapes(rollout) if each.shared == 0][-1]
    packet = pack_decode([row], [], shape, rollout)
    decode = Decode(shape=shape, packet=packet, owners=(None,) * shape.rows)
    results, _ = runner.advance(Plan(prefills=(), decode=decode), None, hold=False)
    assert results is not None
    assert results.block is not None
    return results.block.packet[:, 0, row.slot]


def read_all(
    runner: Runner, rollout: RolloutConfig, tokens: np.ndarray, table: list[int], start: int = 0
) -> None:
    """Computes a prompt but for its last token, from a position on."""
    last = len(tokens) - 1
    for begin in range(start, last, rollout.chunk):
        read(runner, rollout, span(tokens, begin, min(last, begin + rollout.chunk), table))


def span(tokens: np.ndarray, start: int, stop: int, table: list[int]) -> Span:
    return Span(slot=0, start=start, tokens=tokens[start:stop], table=table)


def row(slot: int, tokens: np.ndarray, table: list[int]) -> DecodeRow:
    first = Fresh(
        token=int(tokens[-1]), limit=9, seed=(0, 1), choice=0, temperature=1.0, stop_ids=()
    )
    return DecodeRow(slot=slot, position=len(tokens) - 1, fresh=first, table=table)


def test_every_shape_is_compiled_before_the_first_plan() -> None:
    runner = started(ROLLOUT)
    runner.warm_up()
    before = dict(programs.traces)
    tokens = prompt(0, LENGTH)
    for shape in prefill_shapes(ROLLOUT):
        packet = pack_prefill([span(tokens, 0, 2, TABLE)], shape, ROLLOUT)
        call = Prefill(shape=shape, packet=packet, parts=())
        runner.advance(Plan(prefills=(call,), decode=None), None, hold=False)
    for shape in decode_shapes(ROLLOUT):
        packet = pack_decode([row(0, tokens[:2], [3])], [], shape, ROLLOUT)
        decode = Decode(shape=shape, packet=packet, owners=(None,) * shape.rows)
        runner.advance(Plan(prefills=(), decode=decode), None, hold=False)
    runner.ingest(TABLE, runner.landed(runner.stage(TABLE)))
    runner.publish(1, weights(1))
    assert dict(programs.traces) == before


def test_pages_that_go_out_and_in_are_the_same() -> None:
    runner = started(dataclasses.replace(ROLLOUT, pages=60))
    everything = list(range(1, 60))
    rng = np.random.default_rng(0)

    def drawn(count: int) -> list[Page]:
        return [Page(rng.normal(size=runner.page[0]).astype(np.float32)) for _ in range(count)]

    def held(pages: list[int]) -> list[np.ndarray]:
        parts = runner.stage(pages)
        assert len(parts) == -(-len(pages) // MOVED)
        return [x for part in parts for x in np.asarray(part.kv)][: len(pages)]

    wanted = drawn(len(everything))
    runner.ingest(everything, parts_of(wanted))
    some = rng.permutation(everything)[: MOVED + 3].tolist()
    new = drawn(len(some))
    runner.ingest([*some[:-1], SCRATCH], parts_of(new))  # the last one is not wanted
    for number, page in zip(some[:-1], new, strict=False):
        wanted[number - 1] = page
    for before, after in zip(wanted, held(everything), strict=True):
        np.testing.assert_array_equal(before.kv, after)
    for number, after in zip(some, held(some), strict=True):
        np.testing.assert_array_equal(wanted[number - 1].kv, after)


@pytest.mark.parametrize("cached", [4, 8, 12])
def test_what_is_cached_changes_no_bit_where_one_shape_is_asked_for(cached: int) -> None:
    """A prefix that another request has computed, and the same prompt on an empty device."""
    tokens, other = prompt(0, LENGTH), prompt(1, LENGTH)
    other[:cached] = tokens[:cached]
    cold, warm = started(STRICT), started(STRICT)
    read_all(cold, STRICT, tokens, TABLE)
    read_all(warm, STRICT, other, OTHERS)
    sampled(warm, STRICT, row(0, other, OTHERS))
    pages = cached // STRICT.page
    table = OTHERS[:pages] + TABLE[pages:]
    read_all(warm, STRICT, tokens, table, cached)
    found = sampled(warm, STRICT, row(1, tokens, table))
    wanted = sampled(cold, STRICT, row(0, tokens, TABLE))
    assert (wanted[:, packets.STATUS] == packets.GOES_ON).all()
    np.testing.assert_array_equal(found, wanted)
