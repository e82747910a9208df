"""Samples made for tests: small forests with every ordinary accident in them."""

from collections.abc import Sequence

import numpy as np

from forge_jax.types import Sample


def make_sample(
    rng: np.random.Generator,
    tokens: Sequence[int] | np.ndarray,
    mask: Sequence[int] | np.ndarray,
    temperature: float = 1.0,
    inputs: Sequence[int] | None = None,
) -> Sample:
    """A sample with its own random sampler log-prob and advantage at every trained token."""
    mask = np.asarray(mask, bool)
    n = len(mask)
    return Sample(
        tokens=np.asarray(tokens, np.int32),
        mask=mask,
        old_logp=np.where(mask, rng.normal(-4, 1.5, n), 0).astype(np.float32),
        advantage=np.where(mask, rng.normal(0, 1, n), 0).astype(np.float32),
        temperature=temperature,
        inputs=None if inputs is None else np.asarray(inputs, np.int64),
    )


def accidents(seed: int, vocab: int, temperatures: Sequence[float] = (1.0,)) -> list[Sample]:
    """Random samples among which are a duplicate, one that ends inside another, a fork after
    the first token, a separate root, and one-token samples and segments; masks have several
    runs and every trained token has its own advantage."""
    rng = np.random.default_rng(seed)

    def draw(n: int) -> list[int]:
        return rng.integers(0, vocab, n).tolist()

    trunk = draw(12)
    sequences = [trunk, trunk, trunk[:7], [trunk[0], *draw(6)], draw(9), draw(1), [trunk[0]]]
    sequences.append([*trunk, *draw(1)])
    for _ in range(6):
        base = sequences[rng.integers(len(sequences))]
        sequences.append([*base[: rng.integers(1, len(base) + 1)], *draw(rng.integers(0, 7))])
    samples = []
    for tokens in sequences:
        mask = rng.random(len(tokens)) < 0.5
        mask[: rng.integers(1, len(tokens) + 1) if rng.random() < 0.5 else 1] = False
        samples.append(make_sample(rng, tokens, mask, float(rng.choice(temperatures))))
    return [samples[i] for i in rng.permutation(len(samples))]


def agentic(
    seed: int,
    vocab: int,
    *,
    rollouts: int = 3,
    turns: int = 3,
    system: int = 24,
    observation: int = 5,
    action: int = 4,
    forget: int = 0,
) -> list[Sample]:
    """One sample a model call, as an agent loop logs them: the whole history, then an action.

    The first `forget` tokens of an action are dropped from later prompts, as templates do
    with reasoning. One rollout compacts its history half way.
    """
    rng = np.random.default_rng(seed)

    def draw(mean: int) -> list[int]:
        return rng.integers(0, vocab, rng.integers(max(1, mean - 2), mean + 3)).tolist()

    head, samples = draw(system), []
    for rollout in range(rollouts):
        history: list[int] = []
        for turn in range(turns):
            if rollout == 0 and turn == turns // 2:
                history = draw(observation)
            prompt = [*head, *history, *draw(observation)]
            reply = draw(action + forget)
            mask = [0] * len(prompt) + [1] * len(reply)
            samples.append(make_sample(rng, [*prompt, *reply], mask))
            history = [*prompt[len(head) :], *reply[forget:]]
    return samples
