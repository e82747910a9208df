"""Two samples share a token only if it, its other inputs and its whole context agree."""

import dataclasses

import numpy as np
import pytest
from synthetic import accidents, make_sample

from forge_jax.sched.merge import MODES, merge, unique_tokens
from forge_jax.types import PackedTree, Sample

SHARED = ("tree", "chain")


def pair(
    first: list[int],
    second: list[int],
    inputs: tuple[list[int] | None, list[int] | None] = (None, None),
) -> list[Sample]:
    """Two samples that train their last token; in a chain the second may extend the first."""
    rng = np.random.default_rng(0)
    return [
        make_sample(rng, tokens, [0] * (len(tokens) - 1) + [1], inputs=more)
        for tokens, more in zip((first, second), inputs, strict=True)
    ]


def forest(tree: PackedTree) -> list[list[int]]:
    """What a forest looks like whatever its tokens are called."""
    names = ("depth", "parent", "exit", "edge_token", "occurrence_edge", "occurrence_index")
    return [getattr(tree, name).tolist() for name in names]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(12))
def test_other_inputs_are_as_good_as_other_tokens(seed: int, mode: str) -> None:
    rng = np.random.default_rng(seed)
    vocab, kinds = 3, np.array([0, -7, 2**40])
    samples, renamed = [], []
    for sample in accidents(seed, vocab):
        kind = rng.choice(3, len(sample.tokens), p=[0.8, 0.1, 0.1])
        # None stands for 0 everywhere.
        inputs = kinds[kind] if kind.any() or rng.random() < 0.5 else None
        samples.append(dataclasses.replace(sample, inputs=inputs))
        tokens = sample.tokens + vocab * kind.astype(np.int32)
        renamed.append(dataclasses.replace(sample, tokens=tokens))
    found, wanted = merge(samples, mode), merge(renamed, mode)
    assert forest(found) == forest(wanted)
    assert (found.tokens == wanted.tokens % vocab).all()
    assert unique_tokens(samples) == unique_tokens(renamed)


@pytest.mark.parametrize("mode", SHARED)
@pytest.mark.parametrize("where", ["adapter", "image", "route", "offset"])
def test_no_token_is_shared_below_a_different_input(where: str, mode: str) -> None:
    context = [5, 6, 7, 8]
    inputs = {
        "adapter": [3, 3, 3, 3],  # of the whole sample
        "image": [0, 9, 9, 0],  # patches that have the same placeholder for an id
        "route": [0, 0, 4, 0],  # experts replayed at one token
        "offset": [0, 0, 0, 1],
    }[where]
    first = next(i for i, key in enumerate(inputs) if key)
    short, long = pair(context, [*context, 1], (None, [*inputs, 0]))
    kept = first if mode == "tree" else 0
    assert merge([short, long], mode).n_tokens == 4 + 5 - kept
    same = dataclasses.replace(short, inputs=np.array(inputs))
    assert merge([same, long], mode).n_tokens == 5


@pytest.mark.parametrize("mode", SHARED)
def test_equal_tokens_in_another_context_are_apart(mode: str) -> None:
    tree = merge(pair([1, 5, 6, 7], [2, 5, 6, 7, 8]), mode)
    assert tree.n_tokens == 9
    assert len(set(tree.edge_token.tolist())) == 2


def test_ordinary_cases_of_a_tree() -> None:
    def edges(*sequences: list[int]) -> tuple[int, int, int]:
        tree = merge([sample for s in sequences for sample in pair(s, s)[:1]])
        return tree.n_tokens, tree.n_edges, tree.n_occurrences

    assert edges([1, 2, 3], [1, 2, 3]) == (3, 1, 2)  # duplicates
    assert edges([1, 2, 3, 4], [1, 2]) == (4, 2, 2)  # one ends inside another
    assert edges([1, 2, 3], [1, 4, 5]) == (5, 2, 2)  # a fork at the first token
    assert edges([1, 2], [1, 3], [1, 4]) == (4, 3, 3)  # segments of one token
    assert edges([1, 2], [3, 2]) == (4, 2, 2)  # other roots


def test_samples_on_one_edge_keep_their_own_targets() -> None:
    rng = np.random.default_rng(0)
    samples = [make_sample(rng, [1, 2, 3], [0, 1, 1]) for _ in range(5)]
    tree = merge(samples)
    assert (tree.n_tokens, tree.n_edges, tree.n_occurrences) == (3, 2, 10)
    for edge, place in ((0, 1), (1, 2)):
        on = tree.occurrence_edge == edge
        assert tree.occurrence_sample[on].tolist() == [0, 1, 2, 3, 4]
        assert tree.advantage[on].tolist() == [s.advantage[place] for s in samples]
        assert tree.old_logp[on].tolist() == [s.old_logp[place] for s in samples]


@pytest.mark.parametrize("mode", MODES)
def test_a_response_in_a_later_prompt_is_trained_once(mode: str) -> None:
    rng = np.random.default_rng(0)
    calls = [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8]]
    samples = [make_sample(rng, call, [0] * (len(call) - 2) + [1, 1]) for call in calls]
    samples[0] = make_sample(rng, calls[0], [0, 0, 1, 1])
    tree = merge(samples, mode)
    # Flat places of [3, 4] of the first call, [5, 6] of the second, [7, 8] of the third.
    assert sorted(tree.occurrence_index.tolist()) == [2, 3, 8, 9, 16, 17]
    assert tree.n_edges == 6
    if mode != "none":
        assert tree.n_tokens == 8


def test_inputs_have_a_place_for_every_token() -> None:
    with pytest.raises(ValueError, match="inputs has 2 entries, tokens 3"):
        make_sample(np.random.default_rng(0), [1, 2, 3], [0, 0, 1], inputs=[1, 1])
