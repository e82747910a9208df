"""Workloads by name: what their samples look like, and that a seed repeats them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.bench.flops import update_flops, work
from experiments.models import preset
from experiments.workloads import SHAPES, WorkloadConfig, generate, straight, write
from forge_jax.config import UserError, load
from forge_jax.sched.merge import MODES, merge
from forge_jax.sched.workload import read_workload
from forge_jax.types import Sample

VOCAB = 8192


def samples_of(name: str, folder: Path) -> list[Sample]:
    write(folder / "w.npz", SHAPES[name], VOCAB, 0)
    return read_workload(str(folder / "w.npz"), VOCAB)


@pytest.mark.parametrize("name", ["micro", "agentic", "fork"])
def test_a_seed_repeats_a_workload(name: str) -> None:
    first, again, other = (generate(SHAPES[name], VOCAB, seed) for seed in (1, 1, 2))
    for key, value in first.items():
        np.testing.assert_array_equal(value, again[key])
    assert not np.array_equal(first["tokens"][:100], other["tokens"][:100])


def test_a_file_reads_back_as_it_was_generated(tmp_path: Path) -> None:
    arrays, samples = generate(SHAPES["micro"], VOCAB, 0), samples_of("micro", tmp_path)
    assert len(samples) == len(arrays["lengths"]) == 4 * (4 + 1)
    flat = [np.concatenate([getattr(s, key) for s in samples]) for key in ("tokens", "old_logp")]
    np.testing.assert_array_equal(flat[0], arrays["tokens"])
    np.testing.assert_array_equal(flat[1], arrays["old_logprobs"])
    for i, sample in enumerate(samples):
        prompt = arrays["prompt_lengths"][i]
        assert not sample.mask[:prompt].any()
        assert sample.mask[prompt:].all()
        assert set(sample.advantage[prompt:]) == {arrays["advantages"][i]}
        assert np.all(sample.old_logp[prompt:] < 0)


# Samples, and the FLOPs of each call by itself and of chains over those of the tree, for the
# sizes of bench-10m, by which the published figures are told.
IDEALS = {
    "agentic": (8 * 17, 8.2, 1.44),
    "think": (8 * 17, 5.7, 5.7),
    "fork": (8 * 16, 16.7, 1.87),
    "forge40": (8 * 64, 33.3, 1.09),
    "forge100": (8 * 100, 45.9, 1.05),
}


@pytest.mark.parametrize("name", IDEALS)
def test_shapes_have_the_redundancy_they_are_named_for(name: str, tmp_path: Path) -> None:
    samples = samples_of(name, tmp_path)
    cfg, _ = preset("bench-10m")
    flops = {mode: update_flops(cfg, work(merge(samples, mode))) for mode in MODES}
    count, over_none, over_chain = IDEALS[name]
    assert len(samples) == count
    assert flops["none"] / flops["tree"] == pytest.approx(over_none, rel=0.02)
    assert flops["chain"] / flops["tree"] == pytest.approx(over_chain, rel=0.02)


def test_shared_calls_are_duplicates_with_advantages_of_their_own(tmp_path: Path) -> None:
    samples, arrays = samples_of("fork", tmp_path), generate(SHAPES["fork"], VOCAB, 0)
    shared = [s for s, turn in zip(samples, arrays["turn"], strict=True) if turn == 7]
    assert len(shared) == 8
    assert len({s.tokens.tobytes() for s in shared}) == 1
    assert len({s.old_logp.tobytes() for s in shared}) == 1
    assert len({s.advantage[-1] for s in shared}) == 8
    advantages = [s.advantage[-1] for s in shared]
    assert np.mean(advantages) == pytest.approx(0, abs=1e-6)
    assert np.std(advantages) == pytest.approx(1, rel=1e-6)


def rollout(arrays: dict[str, np.ndarray], number: int) -> list[tuple[int, list[int], list[int]]]:
    """Turn, prompt and output of each call of a rollout."""
    pieces = np.split(arrays["tokens"], np.cumsum(arrays["lengths"])[:-1])
    return [
        (int(arrays["turn"][i]), pieces[i][:n].tolist(), pieces[i][n:].tolist())
        for i, n in enumerate(arrays["prompt_lengths"])
        if arrays["rollout"][i] == number
    ]


def test_a_summary_replaces_the_history(tmp_path: Path) -> None:
    shape = SHAPES["micro"]
    calls = rollout(generate(shape, VOCAB, 0), 2)
    assert [turn for turn, _, _ in calls] == [0, 1, -1, 2, 3]
    head = shape.system + shape.task
    (_, before, said), (_, asked, summary), (_, after, _) = calls[1:4]
    assert asked[: len(before) + len(said)] == before + said
    assert len(asked) == len(before) + len(said) + shape.instruction
    assert after[: head + len(summary)] == before[:head] + summary


def test_reasoning_is_dropped_from_later_prompts(tmp_path: Path) -> None:
    dropped = SHAPES["think"].dropped
    (_, first, output), (_, second, _) = rollout(generate(SHAPES["think"], VOCAB, 0), 0)[:2]
    kept = first + output[dropped:]
    assert second[: len(kept)] == kept
    assert second[: len(first) + len(output)] != first + output


@pytest.mark.parametrize("paths", [1, 3])
def test_straight_samples_share_nothing(paths: int, tmp_path: Path) -> None:
    write(tmp_path / "w.npz", straight(11, paths), VOCAB, 0)
    samples = read_workload(str(tmp_path / "w.npz"), VOCAB)
    assert [len(sample.tokens) for sample in samples] == [11] * paths
    assert merge(samples, "tree").n_tokens == 11 * paths
    for sample in samples:
        assert sample.mask.sum() == 5
        assert sample.advantage[-1] != 0


def test_the_command_writes_a_file(tmp_path: Path) -> None:
    target = tmp_path / "made"
    done = subprocess.run(
        [sys.executable, "-m", "experiments.workloads", "name=micro", f"out={target}", "vocab=64"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    samples = read_workload(str(target), 64)
    assert found["samples"] == len(samples) == 20
    assert found["tokens_total"] == sum(len(sample.tokens) for sample in samples)


MISTAKES: dict[tuple[str, Any], str] = {
    ("name", "huge"): "name='huge' must be one of micro, agentic",
    ("out", "absent/w.npz"): "out='absent/w.npz'",
    ("vocab", 4): "vocab=4",
    ("seed", -1): "seed=-1",
}


@pytest.mark.parametrize(("key", "value"), MISTAKES)
def test_a_mistake_names_key_and_value(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=re.escape(MISTAKES[key, value])):
        load(WorkloadConfig, {"name": "micro", "out": "w.npz", key: value})


def test_a_file_that_cannot_be_written_is_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        write(tmp_path, SHAPES["micro"], VOCAB, 0)
