"""The benchmark of structured output says what grammars did."""

import asyncio

import pytest

from experiments.bench_grammar import BenchConfig, measured
from experiments.models import resolve


def benchmark(**keys: object) -> BenchConfig:
    given: dict = {
        "model": "micro", "kind": "regex", "grammar": "ab{3,5}c, and so on", "prompt": "x",
        "requests": 2, "max_tokens": 24, "temperature": 1.0, "support": 8, "slots": 2,
    }  # fmt: skip
    return BenchConfig(**given | keys)


def test_tokens_and_costs_are_told() -> None:
    told = asyncio.run(measured(benchmark(), resolve("micro")))
    assert told["ended"] == 2
    assert 2 * 17 <= told["tokens_out"] <= 2 * 19
    assert told["lost_share"] == 0
    assert told["forced_share"] > 0.5
    assert told["calls_per_token"] < 0.5
    assert told["us_per_call_p99"] >= told["us_per_call_p50"] > 0


def test_a_bad_benchmark_is_refused() -> None:
    with pytest.raises(ValueError, match="kind='xml'"):
        benchmark(kind="xml")
    with pytest.raises(ValueError, match="requests=0"):
        benchmark(requests=0)
