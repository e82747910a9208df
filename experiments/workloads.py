"""Agentic workloads by name: the samples that an agent's calls would have left.

    python -m experiments.workloads name=agentic out=FILE.npz [vocab=8192] [seed=0]

A name goes in; the flat arrays of a workload file come out, the same for the same seed. A
task is played by a group of rollouts; each call of a rollout is one sample, its prompt the
whole history as the model saw it, its output what is trained.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.command import command
from forge_jax.config import UserError, check, load
from forge_jax.sched.merge import unique_tokens
from forge_jax.sched.workload import read_workload

SPECIAL = 4  # ids below it never occur
NOISE = 0.05  # nats, of the sampler's log-probs around those of a fresh model
STALE, STALE_SHIFT = 0.02, 1.5  # share of outputs sampled by other weights; nats, either way
COMPACTION = -1  # the turn number of a summary's sample


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the calls of a task look like; lengths in tokens, means where they vary."""

    tasks: int = 1
    group: int = 8  # G: rollouts of a task
    turns: int = 16  # T: calls of a rollout, compactions not counted
    system: int = 512  # prompt of all tasks
    task: int = 64  # prompt of one
    observation: int = 48
    output: int = 32
    vary: float = 0.25  # observations and outputs are uniform in mean * (1 +- vary)
    compact_before: tuple[int, ...] = ()  # turns before which a summary replaces the history
    instruction: int = 16  # what asks for the summary
    summary: int = 64
    dropped: int = 0  # first tokens of an output that later prompts leave out: its reasoning
    shared_turns: int = 0  # first turns that the rollouts of a task have in common


# forge100 is forge40 with longer rollouts.
SHAPES = {
    "micro": Shape(
        group=4, turns=4, system=64, task=16, observation=12, output=8,
        compact_before=(2,), instruction=4, summary=12,
    ),
    "agentic": Shape(compact_before=(8,)),
    "think": Shape(compact_before=(8,), output=48, dropped=24),
    "fork": Shape(shared_turns=8),
    "forge40": Shape(turns=64, system=256, task=16, observation=12, output=8),
    "forge100": Shape(turns=100, system=256, task=16, observation=12, output=8),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """One workload to write; see `configs/workloads.yaml`."""

    name: str
    out: str
    vocab: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        known = ", ".join(SHAPES)
        check(self.name in SHAPES, f"name={self.name!r} must be one of {known}")
        check(self.vocab > SPECIAL, f"vocab={self.vocab} must be more than {SPECIAL}")
        check(self.seed >= 0, f"seed={self.seed} must be >= 0")
        folder = Path(self.out).absolute().parent
        check(folder.is_dir(), f"out={self.out!r}: no such folder to write it in")


@command("workloads")
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    cfg = load(WorkloadConfig, mapping)
    write(cfg.out, SHAPES[cfg.name], cfg.vocab, cfg.seed)
    samples = read_workload(cfg.out, cfg.vocab)
    return {
        "name": cfg.name,
        "out": cfg.out,
        "samples": len(samples),
        "tokens_total": sum(len(sample.tokens) for sample in samples),
        "tokens_unique": unique_tokens(samples),
        "trained_tokens": sum(int(sample.mask.sum()) for sample in samples),
    }


def write(path: str | Path, shape: Shape, vocab: int, seed: int) -> None:
    """Writes the workload of a shape. Raises UserError where the file cannot be written."""
    try:
        with open(path, "wb") as file:  # a name without .npz stays as it is
            np.savez(file, allow_pickle=False, **generate(shape, vocab, seed))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error}") from error


def straight(length: int, paths: int) -> Shape:
    """Isolated samples of exactly `length` tokens, the second half of each trained."""
    half = length // 2
    return Shape(
        group=paths, turns=1, system=0, task=0, observation=length - half, output=half, vary=0.0
    )


class _Turn(NamedTuple):
    """What a rollout saw and did between two prompts."""

    observation: np.ndarray  # i32[n]
    output: np.ndarray  # i32[m]
    old_logp: np.ndarray  # f32[m], the sampler's


class _Call(NamedTuple):
    """One sample before it is flat."""

    prompt: Sequence[np.ndarray]  # pieces
    output: np.ndarray
    old_logp: np.ndarray
    advantage: float
    task: int
    rollout: int
    turn: int


def generate(shape: Shape, vocab: int, seed: int) -> dict[str, np.ndarray]:
    """The arrays of a workload file, as `forge_jax.sched.workload` describes them.

    Beside them, for other programs: ``prompt_lengths``, ``task``, ``rollout`` and ``turn``
    (-1 for a summary), each i32[N], and the shape as JSON.
    """
    calls = list(_calls(shape, vocab, np.random.default_rng(seed)))
    prompts = [np.concatenate(call.prompt) for call in calls]
    prompt_lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    output_lengths = np.array([len(call.output) for call in calls], np.int32)
    runs = np.stack([prompt_lengths, output_lengths], axis=1).ravel()
    mask = np.repeat(np.tile(np.array([0, 1], np.uint8), len(calls)), runs)
    old = np.zeros(len(mask), np.float32)
    old[mask == 1] = np.concatenate([call.old_logp for call in calls])
    pieces = [x for prompt, call in zip(prompts, calls, strict=True) for x in (prompt, call.output)]
    return {
        "tokens": np.concatenate(pieces).astype(np.int32),
        "lengths": prompt_lengths + output_lengths,
        "completion_mask": mask,
        "old_logprobs": old,
        "advantages": np.array([call.advantage for call in calls], np.float32),
        "prompt_lengths": prompt_lengths,
        "task": np.array([call.task for call in calls], np.int32),
        "rollout": np.array([call.rollout for call in calls], np.int32),
        "turn": np.array([call.turn for call in calls], np.int32),
        "config": np.array(json.dumps(asdict(shape) | {"vocab": vocab, "seed": seed})),
    }


def _calls(shape: Shape, vocab: int, rng: np.random.Generator) -> Iterator[_Call]:
    system = _ids(rng, shape.system, vocab)
    for task in range(shape.tasks):
        head = [system, _ids(rng, shape.task, vocab)]
        advantages = _advantages(rng, shape.group)
        shared = [_turn(rng, shape, vocab) for _ in range(shape.shared_turns)]
        for member, advantage in enumerate(advantages):
            own = [_turn(rng, shape, vocab) for _ in range(shape.turns - shape.shared_turns)]
            whose = (float(advantage), task, task * shape.group + member)
            yield from _rollout(rng, shape, vocab, head, [*shared, *own], whose)


def _rollout(
    rng: np.random.Generator,
    shape: Shape,
    vocab: int,
    head: list[np.ndarray],
    turns: Sequence[_Turn],
    whose: tuple[float, int, int],
) -> Iterator[_Call]:
    """The calls of one rollout; `whose` is its advantage, task and number."""
    history: list[np.ndarray] = []
    for number, turn in enumerate(turns):
        if number in shape.compact_before:
            summary = _ids(rng, shape.summary, vocab)
            prompt = [*head, *history, _ids(rng, shape.instruction, vocab)]
            old_logp = _old_logp(rng, shape.summary, vocab)
            yield _Call(prompt, summary, old_logp, *whose, COMPACTION)
            history = [summary]
        history = [*history, turn.observation]
        yield _Call([*head, *history], turn.output, turn.old_logp, *whose, number)
        history = [*history, turn.output[shape.dropped :]]


def _turn(rng: np.random.Generator, shape: Shape, vocab: int) -> _Turn:
    observation = _ids(rng, _length(rng, shape.observation, shape.vary), vocab)
    # Something is left of an output without its reasoning.
    size = max(_length(rng, shape.output, shape.vary), shape.dropped + 1)
    return _Turn(observation, _ids(rng, size, vocab), _old_logp(rng, size, vocab))


def _length(rng: np.random.Generator, mean: int, vary: float) -> int:
    low, high = round(mean * (1 - vary)), round(mean * (1 + vary))
    return max(1, int(rng.integers(low, high + 1)))


def _ids(rng: np.random.Generator, size: int, vocab: int) -> np.ndarray:
    return rng.integers(SPECIAL, vocab, size, np.int32)


def _old_logp(rng: np.random.Generator, size: int, vocab: int) -> np.ndarray:
    """About what a fresh model gives, so that ratios are near 1; a few are far off."""
    stale = rng.choice([-STALE_SHIFT, 0.0, STALE_SHIFT], size, p=[STALE / 2, 1 - STALE, STALE / 2])
    return (rng.normal(-np.log(vocab), NOISE, size) + stale).astype(np.float32)


def _advantages(rng: np.random.Generator, group: int) -> np.ndarray:
    """Of rewards about 0 or 1, less their mean and over their deviation; 1 for a group of one."""
    if group == 1:
        return np.ones(1)
    reward = rng.integers(0, 2, group) + 0.1 * rng.random(group)
    return (reward - reward.mean()) / reward.std()


if __name__ == "__main__":
    main()
