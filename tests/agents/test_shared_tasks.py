"""One stream of several domains: shares at any time, and states that go on exactly."""

from collections import Counter

import pytest

from forge_jax.agents.curriculum import DomainTasks
from forge_jax.agents.shared_tasks import SharedTasks
from forge_jax.config import UserError

SHARES = {"hop": 0.5, "notes": 0.3, "calc": 0.2}


def made(shares: dict[str, float] = SHARES) -> SharedTasks:
    return SharedTasks({f: DomainTasks(f, seed=3) for f in shares}, list(shares.values()))


def test_no_domain_is_a_task_ahead_of_its_share_or_behind() -> None:
    source, given = made(), Counter[str]()
    for count in range(1, 200):
        given[next(source).family] += 1
        for family, share in SHARES.items():
            assert abs(given[family] - share * count) < 1
    assert source.report()["admitted_hop"] == given["hop"]


def test_each_domains_tasks_are_those_it_has_alone() -> None:
    source, alone = made(), {family: DomainTasks(family, seed=3) for family in SHARES}
    for task in (next(source) for _ in range(50)):
        assert task == next(alone[task.family])


def test_a_restored_source_goes_on_exactly() -> None:
    source, other = made(), made()
    for _ in range(17):
        next(source)
    other.restore(source.state())
    assert [next(other) for _ in range(30)] == [next(source) for _ in range(30)]


def test_a_state_of_other_shares_is_refused() -> None:
    with pytest.raises(UserError, match="cannot continue"):
        made().restore(made({"hop": 0.5, "notes": 0.5}).state())
