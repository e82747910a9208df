"""Every sampled token is trained, or left out for one counted reason."""

from collections import Counter

import numpy as np
import pytest
from small_policy import CUT

from forge_jax.config import MeshConfig, PackConfig
from forge_jax.rl.collect import Taken
from forge_jax.rl.credit import LeftOut, group_samples, left_out
from forge_jax.rl.measure import batch_row, episode_row
from forge_jax.sched.pack import micro_batches
from forge_jax.types import CLOSED, LOST, Episode, Finish, Outcome, Status, Support, Task, Turn


def random_turn(rng: np.random.Generator) -> Turn:
    prompt, output = rng.integers(1, 9), rng.integers(0, 9)
    support = None
    if rng.random() < 0.5:
        support = Support(
            ids=np.zeros((output, 2), np.int32),
            offsets=np.zeros((output, 2), np.float32),
            kind=rng.choice([CLOSED, LOST], output).astype(np.int8),
        )
    return Turn(
        prompt=rng.integers(0, 3, prompt).astype(np.int32),  # few words: many calls agree
        output=rng.integers(0, 3, output).astype(np.int32),
        logprobs=-rng.random(output).astype(np.float32),
        versions=np.zeros(output, np.int32),
        temperature=float(rng.choice([0.0, 1.0], p=[0.2, 0.8])),
        finish=list(Finish)[rng.integers(len(Finish))],
        parent=None,
        start=0.0,
        seconds=0.1,
        queue_seconds=0.0,
        support=support,
    )


def random_group(rng: np.random.Generator, item: int) -> tuple[Episode, ...]:
    fails = rng.random() < 0.5
    return tuple(
        Episode(
            item=item,
            replica=replica,
            task=Task(family="hop", seed=0),
            outcome=Outcome(
                status=list(Status)[rng.integers(len(Status))] if fails else Status.COMPLETED,
                reward=float(rng.integers(2)),
            ),
            turns=tuple(random_turn(rng) for _ in range(rng.integers(4))),
        )
        for replica in range(rng.integers(5))
    )


@pytest.mark.parametrize("seed", range(30))
def test_tokens_sampled_are_trained_or_left_out_for_one_reason(seed: int) -> None:
    rng = np.random.default_rng(seed)
    taken = [Taken(number=i, lag=0, updates=0, episodes=random_group(rng, i)) for i in range(6)]
    for item in taken:
        trained = sum(int(s.mask.sum()) for s, _ in group_samples(item.episodes))
        sampled = sum(len(t.output) for e in item.episodes for t in e.turns)
        assert trained + sum(left_out(item.episodes).values()) == sampled
    samples = [sample for item in taken for sample, _ in group_samples(item.episodes)]
    trees = micro_batches(samples, "tree", PackConfig(budget=256), CUT, MeshConfig(), True)
    missed: Counter[LeftOut] = Counter()
    for item in taken:
        missed.update(left_out(item.episodes))
    row = episode_row(taken) | batch_row(missed, samples, trees)
    left = {name: n for name, n in row.items() if name.startswith("tokens_left_out_")}
    assert row["tokens_sampled"] == row["tokens_trained"] + sum(left.values())


def test_every_reason_is_counted_on_its_own() -> None:
    def turn(finish=Finish.STOP, temperature=1.0, lost=0) -> Turn:
        support = Support(
            ids=np.zeros((4, 1), np.int32),
            offsets=np.zeros((4, 1), np.float32),
            kind=np.array([LOST] * lost + [CLOSED] * (4 - lost), np.int8),
        )
        some = np.arange(4, dtype=np.int32)
        return Turn(
            prompt=some, output=some, logprobs=np.float32(-1) * some, versions=some,
            temperature=temperature, finish=finish, parent=None, start=0.0, seconds=0.1,
            queue_seconds=0.0, support=support,
        )  # fmt: skip

    def episode(reward: float, *turns: Turn, status=Status.COMPLETED) -> Episode:
        outcome = Outcome(status=status, reward=reward)
        return Episode(
            item=0, replica=0, task=Task(family="hop", seed=0), outcome=outcome, turns=turns
        )

    aborted = turn(finish=Finish.ABORT)
    group = [
        episode(1.0, turn(lost=1), turn(temperature=0.0), aborted),
        episode(0.0, turn()),
        *(episode(0.0, turn(), status=status) for status in Status if status != "completed"),
    ]
    assert left_out(group) == {
        LeftOut.ABANDONED: 4, LeftOut.ENVIRONMENT_FAILED: 4, LeftOut.AGENT_FAILED: 4,
        LeftOut.TIMED_OUT: 4, LeftOut.EXPIRED: 4, LeftOut.GREEDY: 4,
        LeftOut.CONSTANT_GROUP: 0, LeftOut.SUPPORT: 1,
    }  # fmt: skip
    equal = left_out([episode(1.0, turn(lost=2)), episode(1.0, turn(), aborted)])
    assert equal == dict.fromkeys(LeftOut, 0) | {LeftOut.CONSTANT_GROUP: 8, LeftOut.ABANDONED: 4}
