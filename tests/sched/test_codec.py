"""Episodes as bytes: exact there and back, and any damage is seen."""

import dataclasses
import random

import numpy as np
import pytest
from random_episodes import random_group, same

from forge_jax.config import UserError
from forge_jax.sched import codec
from forge_jax.sched.codec import CorruptObject, decode, encode
from forge_jax.types import Episode

KEY = "items/000000000007"


@pytest.mark.parametrize("seed", range(40))
def test_every_field_comes_back_exactly(seed: int) -> None:
    group = random_group(seed)
    data = encode(group)
    assert same(decode(data, KEY), group)
    assert encode(decode(data, KEY)) == data


def with_prompt(prompt: np.ndarray) -> tuple[Episode, ...]:
    """One episode of one turn with this prompt."""
    group = next(g for g in map(random_group, range(99)) if any(e.turns for e in g))
    episode = next(e for e in group if e.turns)
    turn = dataclasses.replace(episode.turns[0], prompt=prompt)
    return (dataclasses.replace(episode, turns=(turn,)),)


@pytest.mark.parametrize("dtype", ["?", "u1", "<i2", ">i4", "<u8", "<f2", ">f8", "<c8"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (3, 2)])
def test_dtype_shape_and_bits_of_any_array_come_back(dtype: str, shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
    bits = np.random.default_rng(0).integers(0, 2, size, dtype=np.uint8)
    group = with_prompt(np.frombuffer(bits.tobytes(), dtype).reshape(shape).T)
    (episode,) = decode(encode(group), KEY)
    assert same(episode, group[0])


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([{}, None]), np.zeros(2, "V2")])
def test_what_is_not_a_number_is_refused(array: np.ndarray) -> None:
    with pytest.raises(ValueError, match="cannot be stored"):
        encode(with_prompt(array))


def test_arrays_are_aligned_and_read_only() -> None:
    (episode,) = decode(encode(with_prompt(np.arange(5, dtype=np.int32))), KEY)
    for name in ("prompt", "output", "logprobs", "versions"):
        array = getattr(episode.turns[0], name)
        assert array.flags.aligned
        assert not array.flags.writeable


def small() -> bytes:
    return encode(with_prompt(np.arange(5, dtype=np.int32)))


def refused(data: bytes) -> bool:
    with pytest.raises(CorruptObject, match=KEY) as caught:
        decode(data, KEY)
    return caught.value.key == KEY


def test_every_truncation_is_seen() -> None:
    data = small()
    assert all(refused(data[:n]) for n in range(len(data)))


def test_every_flipped_bit_is_seen() -> None:
    data = small()
    whole = int.from_bytes(data, "little")
    for bit in range(8 * len(data)):
        assert refused((whole ^ (1 << bit)).to_bytes(len(data), "little"))


@pytest.mark.parametrize("seed", range(20))
def test_random_damage_is_seen(seed: int) -> None:
    rng = random.Random(seed)
    data = encode(random_group(seed, largest=300))
    for _ in range(50):
        broken = bytearray(data)
        for _ in range(rng.randint(1, 5)):
            start = rng.randrange(len(data))
            length = rng.randint(1, 40)
            broken[start : start + length] = rng.choice(
                [b"", bytes(length), rng.randbytes(length), broken[start : start + length] * 2]
            )
        assert bytes(broken) == data or refused(bytes(broken))
    assert refused(data + b"\0")
    assert refused(data + data)
    assert refused(bytes(len(data)))


def test_another_format_version_is_not_called_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "VERSION", 9)
    newer = small()
    monkeypatch.undo()
    with pytest.raises(UserError, match=f"{KEY} has format version 9"):
        decode(newer, KEY)


def test_turns_written_before_there_were_routes_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    [episode] = with_prompt(np.arange(3))
    turns = tuple(dataclasses.replace(turn, routes=None) for turn in episode.turns)
    episode = dataclasses.replace(episode, turns=turns)

    all_fields = dataclasses.fields
    monkeypatch.setattr(codec, "VERSION", 1)
    monkeypatch.setattr(
        dataclasses, "fields", lambda x: [f for f in all_fields(x) if f.name != "routes"]
    )
    older = encode([episode])
    monkeypatch.undo()
    assert b"routes" not in older
    assert same(decode(older, KEY), (episode,))


def test_turns_written_before_there_was_a_lineage_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [episode] = with_prompt(np.arange(3))
    turns = tuple(dataclasses.replace(turn, lineage=None) for turn in episode.turns)
    episode = dataclasses.replace(episode, turns=turns)
    all_fields = dataclasses.fields
    monkeypatch.setattr(codec, "VERSION", 4)
    monkeypatch.setattr(
        dataclasses, "fields", lambda x: [f for f in all_fields(x) if f.name != "lineage"]
    )
    older = encode([episode])
    monkeypatch.undo()
    assert b"lineage" not in older
    assert same(decode(older, KEY), (episode,))
