"""Faults of a chaos run follow from its seed, and damage what they say."""

from pathlib import Path

from experiments.chaos_faults import ENDS, damaged, drawn

COUNTS = {"kill": 2, "preempt": 1, "stop": 1, "slow": 1}


def test_faults_follow_from_the_seed() -> None:
    plans = [drawn(COUNTS, 8, 2, seed) for seed in range(20)]
    assert plans == [drawn(COUNTS, 8, 2, seed) for seed in range(20)]
    assert len({str(plan) for plan in plans}) == 20
    for plan in plans:
        assert sorted(fault.kind for fault in plan) == sorted(
            kind for kind, count in COUNTS.items() for _ in range(count)
        )
        steps = [fault.step for fault in plan]
        assert steps == sorted(steps)
        assert all(1 <= step < 8 for step in steps)
        assert all(len(fault.damage) == (2 if fault.kind in ENDS else 0) for fault in plan)


def test_damaged_objects_are_those_told_however_often(tmp_path: Path) -> None:
    whole = {number: bytes(range(100)) for number in range(5)}
    for number, data in whole.items():
        (tmp_path / f"{number:012d}").write_bytes(data)
    hurt = set(damaged(tmp_path, (0.1, 0.5))) | set(damaged(tmp_path, (0.1, 0.99)))
    assert hurt == {0, 2, 4}
    for number, data in whole.items():
        same = (tmp_path / f"{number:012d}").read_bytes() == data
        assert same == (number not in hurt)
