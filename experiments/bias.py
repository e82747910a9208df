"""Is the estimated policy gradient the exact one, and how much does it vary?

    python -m experiments.bias [plot=FILE.png] [key=value ...]

On `experiments.stopping_toy` every group of episodes is enumerated, and the functions that training
credits with are applied to each; so mean and variance of an estimate are exact, for every policy
of a number drawn at random. Prints a table and {"rows": [{"reward", "estimator", "claimed",
"bias", "bias_max", "cosine", "variance", "variance_low", "variance_high"}...]}: `bias` is the
distance of the mean from the gradient over the gradient's norm, `cosine` that of the angle between
them, `variance` the trace of the covariance over that of whole returns without a baseline: medians
over the policies, with the largest bias and the 5 % and 95 % quantiles of the variance.
docs/results.md reads it.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import stopping_toy as toy
from experiments.command import command
from experiments.simulate import check_plot
from forge_jax.config import CreditConfig, RewardConfig, check, load
from forge_jax.rl.advantages import BASELINES, advantages, constant, deviation, step_advantages
from forge_jax.rl.rewards import ALL, Part, Scorer, part, seen_returns
from forge_jax.types import Episode

LARGEST = 5  # episodes of a group: beyond it there are too many groups


@dataclass(frozen=True, kw_only=True)
class BiasConfig:
    """One comparison; see `configs/bias.yaml`."""

    group: int
    policies: int
    spread: float
    process: float
    speed: float
    gamma: float
    seed: int
    plot: str | None

    def __post_init__(self) -> None:
        check(self.seed >= 0, f"seed={self.seed} must be >= 0")
        check(2 <= self.group <= LARGEST, f"group={self.group} must be from 2 to {LARGEST}")
        check(self.policies >= 1, f"policies={self.policies} must be at least 1")
        check(self.spread >= 0, f"spread={self.spread} must be >= 0")
        for name in ("process", "speed"):
            check(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be > 0")
        check(0 < self.gamma < 1, f"gamma={self.gamma} must be between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Siblings, and what they are worth."""

    episodes: list[Episode]
    parts: list[Part]
    seen: np.ndarray  # f64[n, n, T]

    @property
    def own(self) -> np.ndarray:
        """Returns to go f64[n, T], each as the episode itself sees it."""
        return self.seen[np.arange(len(self.seen)), np.arange(len(self.seen))]


Estimate = Callable[[Group], np.ndarray]  # advantages f64[n, T]


def with_baseline(name: str, whole: bool = False) -> Estimate:
    """Returns minus a baseline, no group left out."""
    return lambda group: advantages(group.seen, BASELINES[name], whole)


def without_constant(group: Group) -> np.ndarray:
    """The default of training: nothing of a group whose returns are all equal."""
    values = advantages(group.seen, BASELINES["leave_one_out"])
    return 0 * values if constant(group.seen) else values


def over_deviation(group: Group) -> np.ndarray:
    """GRPO: whole returns minus the group's mean, over its standard deviation."""
    values = advantages(group.seen, BASELINES["group"], whole=True)
    return 0 * values if constant(group.seen) else values / deviation(values[:, 0])


def with_steps(group: Group) -> np.ndarray:
    """GiGPO without scales: GRPO's and, added, those among calls of the same state."""
    values = advantages(group.seen, BASELINES["group"], whole=True).copy()
    returns = [own[: len(p.calls)] for own, p in zip(group.own, group.parts, strict=True)]
    states = [[turn.prompt.tobytes() for turn in e.turns] for e in group.episodes]
    for row, steps in zip(values, step_advantages(returns, states), strict=True):
        row[: len(steps)] += steps
    return values


def present(group: Group) -> np.ndarray:
    """Returns minus the mean over those siblings that have not ended by this number of call."""
    own, lengths = group.own, np.array([len(p.calls) for p in group.parts])
    here = np.arange(own.shape[1]) < lengths[:, None]
    others = here.sum(axis=0) - here
    total = (own * here).sum(axis=0) - own * here
    return own - np.where(others > 0, total / np.maximum(others, 1), 0.0)


def rewards_by_turn(group: Group) -> np.ndarray:
    """What looks like a baseline and is none: each reward minus the mean reward of the siblings
    that have a call of this number, and then summed over the own calls that come."""
    own, lengths = group.own, np.array([len(p.calls) for p in group.parts])
    here = np.arange(own.shape[1]) < lengths[:, None]
    rewards = (own - np.pad(own[:, 1:], ((0, 0), (0, 1)))) * here
    others = here.sum(axis=0) - here
    mean = np.where(others > 0, (rewards.sum(axis=0) - rewards) / np.maximum(others, 1), 0.0)
    centred = (rewards - mean) * here
    return np.cumsum(centred[:, ::-1], axis=1)[:, ::-1]


def unseen(group: Group) -> np.ndarray:
    """Leave-one-out over what the siblings were paid, into which the episode's own time went."""
    own = np.broadcast_to(group.own, group.seen.shape)
    return advantages(own, BASELINES["leave_one_out"])


WHOLE = "whole return, no baseline"  # what variances are told against
ESTIMATES: Mapping[str, tuple[bool, Estimate]] = {  # whether its mean is said to be exact
    WHOLE: (True, with_baseline("none", whole=True)),
    "to go, no baseline": (True, with_baseline("none")),
    "whole return, leave-one-out": (True, with_baseline("leave_one_out", whole=True)),
    "to go, leave-one-out": (True, with_baseline("leave_one_out")),
    "to go, leave-one-out by turn": (True, with_baseline("turn")),
    "to go, siblings still running": (True, present),
    "to go, leave-one-out, equal groups out": (False, without_constant),
    "to go, group mean (Dr. GRPO)": (False, with_baseline("group")),
    "whole, group mean over deviation (GRPO)": (False, over_deviation),
    "whole, group mean, and steps (GiGPO)": (False, with_steps),
    "rewards centred by turn": (False, rewards_by_turn),
}
SPEED = {
    WHOLE: ESTIMATES[WHOLE],
    "to go, leave-one-out": ESTIMATES["to go, leave-one-out"],
    "to go, leave-one-out of what siblings got": (False, unseen),
}
DISCOUNTED = {"to go, leave-one-out": (False, with_baseline("leave_one_out"))}


@command("bias")
def main(mapping: dict[str, Any]) -> Mapping[str, Any]:
    return measure(load(BiasConfig, mapping))


def measure(cfg: BiasConfig) -> dict[str, Any]:
    """The command's result. Raises UserError naming a bad key."""
    plot = check_plot(cfg.plot)
    process = RewardConfig(process=cfg.process)
    cases: list[tuple[str, Scorer, Mapping[str, tuple[bool, Estimate]]]] = [
        ("outcome", Scorer(), ESTIMATES),
        ("outcome and process", Scorer(reward=process), ESTIMATES),
        ("outcome and speed", Scorer(reward=RewardConfig(speed=cfg.speed)), SPEED),
        (f"gamma {cfg.gamma:g}", Scorer(reward=process, credit=CreditConfig(gamma=cfg.gamma)),
         DISCOUNTED),
    ]  # fmt: skip
    rows, moments = [], Moments(cfg)
    for name, scorer, estimates in cases:
        exact = Scorer(reward=scorer.reward)  # the gradient is that of undiscounted returns
        target, reference = moments.of(with_baseline("none", whole=True), exact)
        for title, (claimed, estimate) in estimates.items():
            mean, variance = moments.of(estimate, scorer)
            bias = np.linalg.norm(mean - target, axis=1) / np.linalg.norm(target, axis=1)
            norms = np.linalg.norm(mean, axis=1) * np.linalg.norm(target, axis=1)
            low, middle, high = np.quantile(variance / reference, [0.05, 0.5, 0.95]).tolist()
            rows.append({
                "reward": name, "estimator": title, "claimed": claimed,
                "bias": float(np.median(bias)), "bias_max": float(bias.max()),
                "cosine": float(np.median((mean * target).sum(axis=1) / norms)),
                "variance": middle, "variance_low": low, "variance_high": high,
            })  # fmt: skip
    print(table(rows), file=sys.stderr)
    if plot is not None:
        draw(plot, rows)
    return {"rows": rows}


class Moments:
    """All groups of the toy, and the policies that they are weighed by."""

    def __init__(self, cfg: BiasConfig):
        self.paths = toy.paths()
        self.episodes = [toy.episode(path) for path in self.paths]
        self.members, orders = toy.groups(len(self.paths), cfg.group)
        rng = np.random.default_rng(cfg.seed)
        logits = cfg.spread * rng.normal(size=(cfg.policies, toy.LOGITS))
        drawn = [toy.policy(one, self.paths) for one in logits]
        self.scores = [scores for _, scores in drawn]
        self.weights = [
            np.exp(np.log(chances)[self.members].sum(axis=1) + orders) for chances, _ in drawn
        ]

    def of(self, estimate: Estimate, scorer: Scorer) -> tuple[np.ndarray, np.ndarray]:
        """Means f64[policies, LOGITS] of one group's estimate, and traces f64[policies] of its
        covariance; an estimate is ``sum over calls of A * score / n``."""
        parts = [part(episode, ALL, scorer) for episode in self.episodes]
        weights = scorer.reward.weights("stop")
        values = np.zeros((*self.members.shape, toy.CALLS))
        for into, members in zip(values, self.members.tolist(), strict=True):
            episodes, own = [self.episodes[m] for m in members], [parts[m] for m in members]
            seen = seen_returns(episodes, own, weights)
            found = estimate(Group(episodes=episodes, parts=own, seen=seen))
            into[:, : found.shape[1]] = found
        means, traces = [], []
        for scores, weight in zip(self.scores, self.weights, strict=True):
            gradient = np.einsum("gnt,gntp->gp", values, scores[self.members]) / values.shape[1]
            mean = weight @ gradient
            means.append(mean)
            traces.append(weight @ (gradient**2).sum(axis=1) - mean @ mean)
        return np.array(means), np.array(traces)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: bias and variance of every estimator, a table for each reward."""
    lines = []
    for reward in dict.fromkeys(row["reward"] for row in rows):
        lines += [
            "",
            f"| {reward} | bias | largest | cosine | variance | 5 % to 95 % |",
            "|---|---|---|---|---|---|",
        ]
        for row in rows:
            if row["reward"] == reward:
                spread = f"{row['variance_low']:.2f} to {row['variance_high']:.2f}"
                size = f"{row['bias']:.1%} | {row['bias_max']:.1%} | {row['cosine']:.3f}"
                lines.append(f"| {row['estimator']} | {size} | {row['variance']:.2f} | {spread} |")
    return "\n".join(lines)


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Bias and variance of every estimator, for each reward."""
    labels = [f"{row['estimator']} [{row['reward']}]" for row in rows]
    figure = Figure(figsize=(12, 0.28 * len(rows) + 1), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    colours = ["tab:blue" if row["claimed"] else "tab:orange" for row in rows]
    left.barh(labels, [row["bias"] for row in rows], color=colours)
    left.set(title="bias (blue: said to have none)")
    right.barh(labels, [row["variance"] for row in rows], color=colours)
    right.axvline(0.4, color="grey", linewidth=1)
    right.set(title="relative variance (line: -60 %)")
    left.invert_yaxis()
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
