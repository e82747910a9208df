"""Episodes made for tests: every field filled, with the accidents that runs produce."""

import dataclasses

import numpy as np

from forge_jax.types import (
    Branch,
    Episode,
    Finish,
    Lineage,
    Outcome,
    Rule,
    Status,
    Support,
    Task,
    Turn,
)


def random_turn(rng: np.random.Generator, largest: int = 12) -> Turn:
    prompt, output = rng.integers(0, largest, 2)
    logprobs = rng.normal(-3, 2, output).astype(np.float32)
    logprobs[rng.random(output) < 0.1] = rng.choice([-np.inf, np.nan, -0.0])
    return Turn(
        prompt=rng.integers(0, 2**31, prompt).astype(np.int32),
        output=rng.integers(0, 259, output).astype(np.int32),
        logprobs=logprobs,
        versions=rng.integers(0, 9, output).astype(np.int32),
        temperature=float(rng.choice([0.0, 0.7, 1.0])),
        finish=list(Finish)[rng.integers(len(Finish))],
        parent=None if rng.random() < 0.5 else int(rng.integers(9)),
        start=rng.random(),
        seconds=float(rng.random() * 1e-9),
        queue_seconds=0.1 + 0.2,
        routes=None if rng.random() < 0.5 else random_routes(rng, prompt + output),
        support=None if rng.random() < 0.5 else random_support(rng, output),
        lineage=None if rng.random() < 0.5 else random_lineage(rng),
        malformed=int(rng.integers(3)),
    )


def random_lineage(rng: np.random.Generator) -> Lineage:
    return Lineage(
        branch=list(Branch)[rng.integers(len(Branch))],
        replies={rule: int(rng.integers(9)) for rule in Rule if rng.random() < 0.5},
        spliced_tokens=int(rng.integers(99)),
        retokenised=int(rng.integers(9)),
        redone=int(rng.integers(9)),
    )


def random_support(rng: np.random.Generator, length: int) -> Support:
    return Support(
        ids=rng.integers(-1, 100, (length, 5)).astype(np.int32),
        offsets=rng.normal(size=(length, 5)).astype(np.float32),
        kind=rng.integers(0, 3, length).astype(np.int8),
    )


def random_routes(rng: np.random.Generator, length: int) -> np.ndarray:
    dtype = rng.choice([np.int8, np.int16])
    return rng.integers(-1, 100, (length, 3, 2)).astype(dtype)


def random_group(item: int, largest: int = 12) -> tuple[Episode, ...]:
    """Up to five episodes, the same for the same arguments; none at all for some items."""
    rng = np.random.default_rng([item, largest])
    errors = ("", "naïve 日本 \x00 \ud800 \n")
    return tuple(
        Episode(
            item=item,
            replica=replica,
            task=Task(family="hop", seed=int(rng.integers(2**62)), split="train"),
            outcome=Outcome(
                status=list(Status)[rng.integers(len(Status))],
                reward=rng.normal(),
                metrics={"turns": 3, "tool_seconds": rng.random(), "odd": float("nan")},
                error=errors[rng.integers(2)],
            ),
            turns=tuple(random_turn(rng, largest) for _ in range(rng.integers(0, 4))),
        )
        for replica in range(rng.integers(0, 6))
    )


def same(one: object, other: object) -> bool:
    """Equality of every field down to the bits of every array; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if dataclasses.is_dataclass(one):
        names = [f.name for f in dataclasses.fields(one)]
        return all(same(getattr(one, n), getattr(other, n)) for n in names)
    return repr(one) == repr(other)
