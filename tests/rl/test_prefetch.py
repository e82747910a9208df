"""One result is made ahead, in order, and errors come where their results would have."""

import threading
from collections.abc import Iterator

import pytest

from forge_jax.rl.prefetch import prefetch


def test_results_come_in_order_from_one_other_thread() -> None:
    threads = set()

    def make(item: int) -> int:
        threads.add(threading.get_ident())
        return item * item

    assert list(prefetch(make, range(20))) == [i * i for i in range(20)]
    assert list(prefetch(make, [])) == []
    assert threading.get_ident() not in threads


def test_the_next_result_is_made_meanwhile_and_no_more() -> None:
    made = [threading.Event() for _ in range(5)]
    results = prefetch(lambda i: made[i].set(), range(5))
    for i in range(4):
        next(results)
        assert made[i + 1].wait(10)
        assert not any(event.is_set() for event in made[i + 2 :])
    next(results)
    with pytest.raises(StopIteration):
        next(results)


def test_an_error_comes_in_its_place_and_ends_the_work() -> None:
    made = []

    def make(item: int) -> int:
        if item == 2:
            raise LookupError("two")
        made.append(item)
        return item

    results = prefetch(make, range(9))
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(LookupError, match="two"):
        next(results)
    assert 4 not in made
    assert next(results, None) is None


def test_an_error_of_the_items_is_the_callers() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        list(prefetch(lambda i: i, items()))


def test_leaving_early_leaves_no_thread() -> None:
    before = threading.active_count()
    results = prefetch(lambda i: i, range(100))
    next(results)
    results.close()
    assert threading.active_count() == before
