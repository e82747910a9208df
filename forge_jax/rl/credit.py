"""From the episodes of groups to training samples with advantages.

Advantages are computed per *episode*, never per sample: a call carries its episode's return from
there on minus a baseline made of the episode's siblings, however the calls are cut into samples.
Episodes that are not valid leave both loss and baseline. Invariant: of any group, tokens sampled =
tokens trained + tokens left out, each of these for one reason.
"""

import dataclasses
import enum
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from forge_jax.drawing import LOST, joined, nothing_of
from forge_jax.rl.advantages import BASELINES, advantages, constant, deviation, step_advantages
from forge_jax.rl.rewards import OUTCOME, Part, Scorer, agents_of, counts, part, seen_returns
from forge_jax.types import Episode, Finish, Outcome, Sample, Status, Turn

Credit = tuple[np.ndarray, ...]  # of each episode of a group, f64[calls]; NaN: no advantage


class LeftOut(enum.StrEnum):
    """Why sampled tokens are not trained on; of several reasons the first counts."""

    ABANDONED = "abandoned"  # nobody received the answer of their call
    ENVIRONMENT_FAILED = Status.ENVIRONMENT_FAILED.value
    AGENT_FAILED = Status.AGENT_FAILED.value
    TIMED_OUT = Status.TIMED_OUT.value
    EXPIRED = Status.EXPIRED.value
    GREEDY = "greedy"  # drawn at temperature 0: there is no log-prob to learn from
    CONSTANT_GROUP = "constant_group"  # its returns are equal, or less than two count
    SUPPORT = "unreproducible_support"  # what they were drawn from cannot be made again


def credited(groups: Sequence[Sequence[Episode]], scorer: Scorer = OUTCOME) -> list[Credit]:
    """For each group and episode the advantages of its calls, f64[len(turns)]; NaN: none.

    None has a call of an episode that does not count, and of a group without signal: fewer than
    two episodes that count, or their returns all equal to within `EQUAL`. An agent with a
    reward of its own is credited from that, against the same agent of the siblings.
    """
    found = [tuple(np.full(len(e.turns), np.nan) for e in group) for group in groups]
    shares = [
        share
        for group, into in zip(groups, found, strict=True)
        for label in agents_of(group)
        if (share := _share(group, into, label, scorer)) is not None
    ]
    for share in shares:
        divisor = _divisor(share, shares, scorer.credit.scale)
        for one, values, into in zip(share.parts, share.values, share.into, strict=True):
            into[one.calls] = values[: len(one.calls)] / divisor
    return found


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Share:
    """The calls of a group that are credited together, in the episodes that count."""

    family: str
    parts: list[Part]
    values: np.ndarray  # f64[n, T], advantages; anything after the last call
    into: list[np.ndarray]  # where those of each episode go


def _share(
    group: Sequence[Episode], into: Sequence[np.ndarray], label: str, scorer: Scorer
) -> _Share | None:
    """None where there is no signal."""
    kept = [number for number, episode in enumerate(group) if counts(episode, label)]
    if len(kept) < 2:
        return None
    episodes, cfg = [group[number] for number in kept], scorer.credit
    family = episodes[0].task.family
    parts = [part(episode, label, scorer) for episode in episodes]
    seen = seen_returns(episodes, parts, scorer.reward.weights(family))
    if constant(seen):
        return None
    values = advantages(seen, BASELINES[cfg.baseline], whole=not cfg.to_go)
    if cfg.step_weight:
        values = values + cfg.step_weight * _step_values(episodes, parts, seen)
    return _Share(family=family, parts=parts, values=values, into=[into[n] for n in kept])


def _step_values(
    episodes: Sequence[Episode], parts: Sequence[Part], seen: np.ndarray
) -> np.ndarray:
    """Step advantages f64[n, T]; the state of a call is its prompt."""
    returns = [seen[i, i, : len(one.calls)] for i, one in enumerate(parts)]
    states = [
        [episode.turns[number].prompt.tobytes() for number in one.calls]
        for episode, one in zip(episodes, parts, strict=True)
    ]
    values = np.zeros(seen.shape[1:])
    for row, found in zip(values, step_advantages(returns, states), strict=True):
        row[: len(found)] = found
    return values


def _divisor(share: _Share, shares: Sequence[_Share], scale: str) -> float:
    """What the advantages of a share are divided by: the deviation of advantages of episodes, at
    their first calls, so that no episode counts more for having more of them."""
    if scale == "none":
        return 1.0
    among = {
        "group": [share],
        "family": [one for one in shares if one.family == share.family],
        "batch": list(shares),
    }
    return deviation(np.concatenate([one.values[:, 0] for one in among[scale]]))


def trainable(turn: Turn) -> bool:
    """True for a completed call drawn at a temperature that has log-probs."""
    return turn.finish is not Finish.ABORT and turn.temperature > 0 and len(turn.output) > 0


def left_out(group: Sequence[Episode], credit: Credit | None = None) -> dict[LeftOut, int]:
    """How many sampled tokens of a group `group_samples` does not train, by every reason."""
    counted: Counter[LeftOut] = Counter()
    for episode, values in zip(group, credit or credited([group])[0], strict=True):
        for turn, value in zip(episode.turns, values, strict=True):
            why = why_left_out(turn, episode.outcome, bool(np.isnan(value)))
            if why is not None:
                counted[why] += len(turn.output)
            elif turn.support is not None:
                counted[LeftOut.SUPPORT] += int(np.count_nonzero(turn.support.kind == LOST))
    return {reason: counted[reason] for reason in LeftOut}


def why_left_out(turn: Turn, outcome: Outcome, constant: bool) -> LeftOut | None:
    """Why nothing of a call is trained; None if all is that can be."""
    if turn.finish is Finish.ABORT:
        return LeftOut.ABANDONED
    if not outcome.valid:
        return LeftOut(outcome.status.value)
    if not trainable(turn):
        return LeftOut.GREEDY
    return LeftOut.CONSTANT_GROUP if constant else None


def says_nothing(group: Sequence[Episode], scorer: Scorer = OUTCOME) -> bool:
    """Whether no call of a group has an advantage: nothing of it would be trained."""
    return all(np.isnan(values).all() for values in credited([group], scorer)[0])


def group_samples(
    group: Sequence[Episode], credit: Credit | None = None
) -> list[tuple[Sample, Turn]]:
    """Every trainable call of a group as a sample, with the turn it came from.

    `credit` is what `credited` has for the group; None: that of the outcome alone. Calls without
    an advantage are no samples: they add nothing to the loss and their tokens leave the
    denominator.
    """
    return [
        (_owned(turn_sample(turn, value), episode), turn)
        for episode, values in zip(group, credit or credited([group])[0], strict=True)
        for turn, value in zip(continued(episode.turns), values.tolist(), strict=True)
        if why_left_out(turn, episode.outcome, math.isnan(value)) is None
    ]


def _owned(sample: Sample, episode: Episode) -> Sample:
    return dataclasses.replace(sample, group=episode.item, episode=episode.replica)


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
