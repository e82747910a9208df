"""A workload file is read as it says, and whatever is wrong with it is named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import accidents

from forge_jax.config import UserError
from forge_jax.sched.workload import read_workload

VOCAB = 11


def arrays() -> dict[str, Any]:
    """Three samples of lengths 4, 1 and 3; the last two tokens of the first and third train."""
    return {
        "tokens": np.array([1, 2, 3, 4, 5, 6, 7, 8], np.int32),
        "lengths": np.array([4, 1, 3], np.int32),
        "completion_mask": np.array([0, 0, 1, 1, 0, 0, 1, 1], np.uint8),
        "old_logprobs": np.array([0, 0, -1, -2, 0, 0, -3, -4], np.float32),
        "advantages": np.array([0.5, 9.0, -1.5], np.float32),
    }


def test_samples_come_out_as_they_went_in(tmp_path: Path) -> None:
    samples = accidents(0, VOCAB)
    fields = {
        "tokens": [s.tokens for s in samples],
        "completion_mask": [s.mask for s in samples],
        "old_logprobs": [s.old_logp for s in samples],
        "advantages_per_token": [s.advantage for s in samples],
    }
    np.savez(
        tmp_path / "w.npz",
        lengths=[len(s.tokens) for s in samples],
        advantages=np.full(len(samples), 7.0),
        ignored=np.array("{}"),
        **{name: np.concatenate(parts) for name, parts in fields.items()},
    )
    for found, sample in zip(read_workload(str(tmp_path / "w.npz"), VOCAB), samples, strict=True):
        for name in ("tokens", "mask", "old_logp", "advantage"):
            np.testing.assert_array_equal(getattr(found, name), getattr(sample, name))


def test_one_advantage_a_sample_is_spread_over_its_trained_tokens(tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", **arrays())
    samples = read_workload(str(tmp_path / "w.npz"), VOCAB)
    assert [s.advantage.tolist() for s in samples] == [[0, 0, 0.5, 0.5], [0], [0, -1.5, -1.5]]


MISTAKES = {
    "lengths too long": ({"lengths": [4, 1, 4]}, "lengths add up to 9, tokens has 8.*sample 2"),
    "lengths too short": ({"lengths": [4, 1, 2]}, "lengths add up to 7, tokens has 8"),
    "short array": (
        {"old_logprobs": np.zeros(3, np.float32)},
        "lengths add up to 8, old_logprobs has 3 entries .sample 0.",
    ),
    "advantages": ({"advantages": np.zeros(2)}, "advantages has 2 entries, not 3 .sample 2."),
    "empty sample": ({"lengths": [4, 0, 4]}, "sample 1 has length 0"),
    "negative length": ({"lengths": [9, -4, 3]}, "sample 1 has length -4"),
    "huge id": ({"tokens": [1, 2, 3, 4, 5, 11, 7, 8]}, r"sample 2: tokens\[0\]=11 is outside.* 11"),
    "negative id": ({"tokens": [1, -2, 3, 4, 5, 6, 7, 8]}, r"sample 0: tokens\[1\]=-2 is outside"),
    "mask of 2": (
        {"completion_mask": [0, 0, 1, 1, 0, 0, 2, 1]},
        r"sample 2: completion_mask\[1\]=2 is neither",
    ),
    "first token": ({"completion_mask": [0, 0, 1, 1, 0, 1, 1, 1]}, "sample 2 trains its first"),
    "one-token sample": ({"completion_mask": [0, 0, 1, 1, 1, 0, 1, 1]}, "sample 1 trains its"),
    "nan log-prob": (
        {"old_logprobs": [0, 0, -1, np.nan, 0, 0, -3, -4]},
        r"sample 0: old_logprobs\[3\]=nan is not finite",
    ),
    "nan advantage": ({"advantages": [0.5, np.nan, 1]}, "sample 1: advantages=nan is not finite"),
    "nan per token": (
        {"advantages_per_token": [0, 0, 0, 0, 0, 0, np.inf, 0]},
        r"sample 2: advantages_per_token\[1\]=inf is not finite",
    ),
    "short per token": ({"advantages_per_token": [0.0]}, "advantages_per_token has 1 entries"),
    "fractional tokens": ({"tokens": np.ones(8)}, r"tokens must be one axis of integers.*float64"),
    "rows": ({"tokens": np.ones((2, 4), np.int32)}, r"tokens must be one axis.*int32\[2, 4\]"),
    "words": ({"advantages": np.array(["a", "b", "c"])}, "advantages must be one axis of numbers"),
    "objects": ({"tokens": np.array([1, None], object)}, "not a readable .npz"),
    "nothing": ({"lengths": np.zeros(0, np.int32)}, "there are no samples"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_names_array_and_sample(name: str, tmp_path: Path) -> None:
    change, message = MISTAKES[name]
    np.savez(tmp_path / "w.npz", **{**arrays(), **change})
    with pytest.raises(UserError, match=message) as caught:
        read_workload(str(tmp_path / "w.npz"), VOCAB)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", arrays())
def test_a_missing_array_is_named(name: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", **{k: v for k, v in arrays().items() if k != name})
    with pytest.raises(UserError, match=f"array {name} is missing"):
        read_workload(str(tmp_path / "w.npz"), VOCAB)


@pytest.mark.parametrize("kind", ["absent", "folder", "text", "cut", "flipped", "npy", "empty"])
def test_an_unreadable_file_is_a_mistake(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    if kind == "folder":
        path.mkdir()
    elif kind == "text":
        path.write_text("tokens 1 2 3")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "npy":
        np.save(tmp_path / "w.npy", np.zeros(3))
        (tmp_path / "w.npy").rename(path)
    elif kind != "absent":
        np.savez_compressed(path, **arrays())
        whole = bytearray(path.read_bytes())
        if kind == "cut":
            whole = whole[: len(whole) // 2]
        else:
            whole[60:90] = bytes(30)
        path.write_bytes(whole)
    with pytest.raises(UserError, match=r"w\.npz"):
        read_workload(str(path), VOCAB)


def test_no_flipped_byte_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    np.savez_compressed(path, **arrays())
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        broken = bytearray(whole)
        broken[rng.integers(len(whole))] ^= rng.integers(1, 256)
        path.write_bytes(broken)
        try:
            read_workload(str(path), VOCAB)
        except UserError:
            refused += 1
    assert refused > 100
