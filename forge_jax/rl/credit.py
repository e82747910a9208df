"""From the episodes of one group to training samples with advantages.

Advantages are computed per *episode*, never per sample: every call of episode i
carries R_i minus the mean reward of its siblings (leave-one-out, so the baseline
does not depend on episode i and adds no bias; RLOO, arXiv 2402.14740). Episodes that
are not valid leave both loss and baseline. Invariant: of any group, tokens sampled =
tokens trained + tokens left out, each of these for one reason.
"""

import dataclasses
import enum
from collections import Counter
from collections.abc import Sequence

import numpy as np

from forge_jax.drawing import LOST, joined, nothing_of
from forge_jax.types import Episode, Finish, Outcome, Sample, Status, Turn

# Rewards of a group closer than this are equal: the group says nothing.
EQUAL = 1e-6


class LeftOut(enum.StrEnum):
    """Why sampled tokens are not trained on; of several reasons the first counts."""

    ABANDONED = "abandoned"  # nobody received the answer of their call
    ENVIRONMENT_FAILED = Status.ENVIRONMENT_FAILED.value
    AGENT_FAILED = Status.AGENT_FAILED.value
    TIMED_OUT = Status.TIMED_OUT.value
    EXPIRED = Status.EXPIRED.value
    GREEDY = "greedy"  # drawn at temperature 0: there is no log-prob to learn from
    CONSTANT_GROUP = "constant_group"  # its rewards are equal, or less than two count
    SUPPORT = "unreproducible_support"  # what they were drawn from cannot be made again


def leave_one_out(rewards: np.ndarray, valid: np.ndarray) -> np.ndarray | None:
    """Rewards f64[G] minus the mean over the other valid episodes; 0 where not valid.

    None where the group carries no signal: fewer than two valid episodes, or all
    their rewards equal to within `EQUAL`.
    """
    kept = rewards[valid]
    if len(kept) < 2 or kept.max() - kept.min() <= EQUAL:
        return None
    others = (kept.sum() - rewards) / (len(kept) - 1)
    return np.where(valid, rewards - others, 0.0)


def trainable(turn: Turn) -> bool:
    """True for a completed call drawn at a temperature that has log-probs."""
    return turn.finish is not Finish.ABORT and turn.temperature > 0 and len(turn.output) > 0


def left_out(group: Sequence[Episode]) -> dict[LeftOut, int]:
    """How many sampled tokens of a group `group_samples` does not train, by every reason."""
    constant = _advantages(group) is None
    counts: Counter[LeftOut] = Counter()
    for episode in group:
        for turn in episode.turns:
            why = why_left_out(turn, episode.outcome, constant)
            if why is not None:
                counts[why] += len(turn.output)
            elif turn.support is not None:
                counts[LeftOut.SUPPORT] += int(np.count_nonzero(turn.support.kind == LOST))
    return {reason: counts[reason] for reason in LeftOut}


def why_left_out(turn: Turn, outcome: Outcome, constant: bool) -> LeftOut | None:
    """Why nothing of a call is trained; None if all is that can be."""
    if turn.finish is Finish.ABORT:
        return LeftOut.ABANDONED
    if not outcome.valid:
        return LeftOut(outcome.status.value)
    if not trainable(turn):
        return LeftOut.GREEDY
    return LeftOut.CONSTANT_GROUP if constant else None


def _advantages(group: Sequence[Episode]) -> np.ndarray | None:
    rewards = np.array([episode.outcome.reward for episode in group], np.float64)
    valid = np.array([episode.outcome.valid for episode in group], bool)
    return leave_one_out(rewards, valid)


def group_samples(group: Sequence[Episode]) -> list[tuple[Sample, Turn]]:
    """Every trainable call of a group as a sample, with the turn it came from.

    A group without signal has none: it adds nothing to the loss and its tokens
    leave the denominator.
    """
    advantages = _advantages(group)
    if advantages is None:
        return []
    return [
        (turn_sample(turn, advantage), turn)
        for episode, advantage in zip(group, advantages, strict=True)
        for turn in continued(episode.turns)
        if why_left_out(turn, episode.outcome, constant=False) is None
    ]


def continued(turns: Sequence[Turn]) -> list[Turn]:
    """`turns`, where the last token of each that a later one continues has the route it was
    fed with there: nothing of its own turn was computed from it, and so the two share it."""
    found = list(turns)
    for later in reversed(turns):
        if later.parent is None or later.routes is None:
            continue
        turn = turns[later.parent]
        if turn.routes is not None and len(turn.output):
            routes = turn.routes.copy()
            routes[-1] = later.routes[len(routes) - 1]
            found[later.parent] = dataclasses.replace(turn, routes=routes)
    return found


def turn_sample(turn: Turn, advantage: float) -> Sample:
    """One call as a sample: the prompt as it was fed, then the sampled tokens, trained but for
    those whose support is lost: what they were drawn from cannot be made again."""
    off = np.zeros(len(turn.prompt), np.float32)
    support, trained = turn.support, np.ones(len(turn.output), bool)
    if support is not None:
        trained = support.kind != LOST
        support = joined([nothing_of(len(off), support.ids.shape[1]), support])
    return Sample(
        tokens=np.concatenate([turn.prompt, turn.output]).astype(np.int32),
        mask=np.concatenate([off > 0, trained]),
        old_logp=np.concatenate([off, np.where(trained, turn.logprobs, 0).astype(np.float32)]),
        advantage=np.concatenate([off, np.where(trained, advantage, 0).astype(np.float32)]),
        temperature=turn.temperature,
        routes=turn.routes,
        support=support,
    )
