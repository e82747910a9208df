"""From the rewards of sibling episodes to advantages of their calls: small pure functions.

Rewards and times of calls go in, returns and advantages f64 come out; nothing here knows of
tokens or tasks. Returns of n siblings are padded to the most calls T, with zeros after the last
call of each. They come as *seen*, f64[n, n, T]: row i holds the returns of all siblings as they
are where nothing of episode i has gone into those of the others. The rows are equal unless
rewards compare siblings, and then a baseline made of row i still depends on the others alone.

`leave_one_out`, `turn_leave_one_out` and `no_baseline` add no bias to the policy gradient (at
γ = 1, unscaled); `group_mean` holds the episode's own return, which shrinks the gradient by
(n - 1) / n, and a scale made of what it scales is biased too. `experiments.bias` measures all.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

# Returns of a group closer than this are equal: the group says nothing.
EQUAL = 1e-6

Baseline = Callable[[np.ndarray], np.ndarray]  # of seen f64[n, n, T]: f64[n, 1] or f64[n, T]


def to_go(rewards: np.ndarray, times: np.ndarray, gamma: float) -> np.ndarray:
    """``G_t = sum over τ >= t of γ^(times_τ - times_t) r_τ``, f64[T]; `times` do not fall."""
    decay = gamma ** np.diff(times)
    returns = np.array(rewards, np.float64)
    for t in reversed(range(len(returns) - 1)):
        returns[t] += decay[t] * returns[t + 1]
    return returns


def leave_one_out(seen: np.ndarray) -> np.ndarray:
    """Mean return of the siblings (RLOO, arXiv 2402.14740), f64[n, 1]; n >= 2."""
    first = np.ascontiguousarray(seen[:, :, 0])
    return ((first.sum(axis=1) - np.diagonal(first)) / (len(first) - 1))[:, None]


def group_mean(seen: np.ndarray) -> np.ndarray:
    """Mean return of the group, the episode's own among them (GRPO, arXiv 2402.03300; without
    a scale Dr. GRPO, arXiv 2503.20783), f64[n, 1]."""
    return seen[:, :, 0].mean(axis=1)[:, None]


def turn_leave_one_out(seen: np.ndarray) -> np.ndarray:
    """Mean return to go of the siblings at the same number of call, 0 for those that have ended,
    f64[n, T]; n >= 2."""
    n = len(seen)
    return (seen.sum(axis=1) - seen[np.arange(n), np.arange(n)]) / (n - 1)


def no_baseline(seen: np.ndarray) -> np.ndarray:
    """0, f64[n, 1]."""
    return np.zeros((len(seen), 1))


BASELINES: Mapping[str, Baseline] = MappingProxyType(
    {
        "leave_one_out": leave_one_out,
        "group": group_mean,
        "turn": turn_leave_one_out,
        "none": no_baseline,
    }
)


def advantages(seen: np.ndarray, baseline: Baseline, whole: bool = False) -> np.ndarray:
    """Returns to go minus the baseline, f64[n, T]; `whole`: returns of the whole episode.

    What stands after an episode's last call means nothing.
    """
    own = seen[np.arange(len(seen)), np.arange(len(seen))]
    taken = np.broadcast_to(own[:, :1], own.shape) if whole else own
    return taken - baseline(seen)


def constant(seen: np.ndarray) -> bool:
    """True where a group carries no signal: less than two episodes, or returns all equal."""
    first = seen[np.arange(len(seen)), np.arange(len(seen)), 0]
    return len(first) < 2 or bool(first.max() - first.min() <= EQUAL)


def deviation(values: np.ndarray) -> float:
    """Sample standard deviation, to divide by: never below `EQUAL`; 1 of fewer than two values."""
    return max(float(np.std(values, ddof=1)), EQUAL) if len(values) > 1 else 1.0


def step_advantages(
    returns: Sequence[np.ndarray], states: Sequence[Sequence[Hashable]]
) -> list[np.ndarray]:
    """Return to go of each call minus the mean over all calls of the group in the same state.

    A state met once has advantage 0. After GiGPO, arXiv 2505.10978, without its scale.
    """
    met: dict[Hashable, list[float]] = {}
    for values, where in zip(returns, states, strict=True):
        for value, state in zip(values, where, strict=True):
            met.setdefault(state, []).append(float(value))
    means = {state: np.mean(values) for state, values in met.items()}
    return [
        np.array([value - means[state] for value, state in zip(values, where, strict=True)])
        for values, where in zip(returns, states, strict=True)
    ]
