"""What followed the longest earlier occurrence of a row's end is its draft."""

import jax
import numpy as np
import pytest

from forge_jax.rollout.ngram import LONGEST, NOTHING, SHORTEST, Memory, lookup
from forge_jax.rollout.verify import NO_DRAFT


def by_hand(row: list[int], end: int, drafts: int) -> list[int]:
    best, place = 0, None
    for i in range(1, end):
        n = 0
        while n < min(LONGEST, i, end) and row[i - 1 - n] == row[end - 1 - n] != NOTHING:
            n += 1
        if n >= max(best, SHORTEST):
            best, place = n, i
    if place is None:
        return [NO_DRAFT] * drafts
    return (row[place : place + drafts] + [NO_DRAFT] * drafts)[:drafts]


@pytest.mark.parametrize("words", [2, 3, 9])
def test_lookup_is_a_search_by_hand(words: int) -> None:
    rng = np.random.default_rng(words)
    rows = rng.integers(0, words, (64, 33))
    rows[rng.uniform(size=rows.shape) < 0.03] = NOTHING
    end = rng.integers(1, 34, 64)
    for row, n in zip(rows, end, strict=True):
        row[n:] = NOTHING
    rows, end = rows.astype(np.int32), end.astype(np.int32)
    found = jax.jit(lookup, static_argnums=2)(rows, end, 3)
    expected = [by_hand(row, n, 3) for row, n in zip(rows.tolist(), end.tolist(), strict=True)]
    assert found.tolist() == expected
    assert any(row != [NO_DRAFT] * 3 for row in expected)


def test_completions_of_the_same_prompt_are_recalled_newest_last() -> None:
    memory = Memory(20)
    prompt, other = np.arange(50, dtype=np.int32), np.arange(1, 51, dtype=np.int32)
    assert (memory.recall(prompt) == NOTHING).all()
    for word in (1, 2, 3):
        memory.remember(prompt, np.full(4, word, np.int32))
    past = prompt[-LONGEST:].tolist()
    expected = [*past, 2, 2, 2, 2, NOTHING, *past, 3, 3, 3, 3, NOTHING]
    assert memory.recall(prompt).tolist() == expected[-20:]
    assert (memory.recall(other) == NOTHING).all()


def test_the_first_token_of_a_completion_is_drafted_from_an_earlier_one() -> None:
    memory = Memory(32)
    prompt = np.array([5, 6, 7], np.int32)
    memory.remember(prompt, np.array([8, 9], np.int32))
    row = np.concatenate([memory.recall(prompt), prompt, [NOTHING] * 4]).astype(np.int32)
    assert lookup(row[None], np.array([35], np.int32), 2).tolist() == [[8, 9]]


def test_a_long_completion_is_kept_by_its_end() -> None:
    memory = Memory(6)
    prompt = np.array([1], np.int32)
    memory.remember(prompt, np.arange(20, dtype=np.int32))
    assert memory.recall(prompt).tolist() == [15, 16, 17, 18, 19, NOTHING]
