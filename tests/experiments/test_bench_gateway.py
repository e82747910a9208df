"""Many sessions at once: no error, every record whole, memory given back or used again."""

import pytest

from experiments.bench_gateway import BenchConfig, Played, measured, wrong


def test_no_record_is_lost_under_load() -> None:
    told = measured(BenchConfig(sessions=60, turns=3, delay_seconds=0.2, waves=2))
    assert (told["errors"], told["lost_calls"], told["wrong_records"]) == (0, 0, 0)
    for wave in told["waves"]:
        assert wave["calls"] == 180
        assert wave["overhead_ms_p99"] >= wave["overhead_ms_p50"] > 0
        assert wave["agent_ms_p50"] >= wave["overhead_ms_p50"]
        assert wave["cpu_ms_per_call"] > 0
    # What the first wave held is free for the second.
    first, second = told["waves"]
    assert second["rss_bytes_full"] < 1.2 * first["rss_bytes_full"]


@pytest.mark.parametrize(
    "change",
    [{}, {"prompt_ids": [1]}, {"output_ids": []}, {"parent": None}],
    ids=["whole", "prompt", "output", "parent"],
)
def test_a_record_is_compared(change: dict) -> None:
    played = Played(prompts=(2, 5), sampled=(1, 1), seconds=(0.1, 0.1))
    turns = [
        {"prompt_ids": [1, 2], "output_ids": [3], "parent": None},
        {"prompt_ids": [1, 2, 3, 4, 5], "output_ids": [6], "parent": 0},
    ]
    assert not wrong(played, turns)
    assert wrong(played, turns[:1])
    assert wrong(played, [turns[0], {**turns[1], **change}]) is bool(change)


@pytest.mark.parametrize(("key", "value"), [("sessions", 0), ("turns", 0), ("delay_seconds", -1)])
def test_a_bad_benchmark_is_refused(key: str, value: float) -> None:
    given = {"sessions": 1, "turns": 1, "delay_seconds": 0.0, "waves": 1}
    with pytest.raises(ValueError, match=f"{key}={value}"):
        BenchConfig(**{**given, key: value})
