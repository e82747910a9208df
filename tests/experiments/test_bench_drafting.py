"""The benchmark of drafts plays the same requests with drafts and without."""

import asyncio

import pytest

from experiments.bench_drafting import BenchConfig, compared
from experiments.models import resolve


def test_a_row_tells_what_the_engine_did() -> None:
    cfg = BenchConfig(model="micro", drafts=2, prompt=8, new_tokens=24, repeat=1)
    told = []
    row = asyncio.run(compared(cfg, resolve("micro"), 2, lambda: told.append(1)))
    assert len(told) == 4  # each engine once untimed and once timed
    assert sum(row["depths"].values()) == pytest.approx(1)
    assert set(row["depths"]) <= {"0", "1", "2"}
    assert 0 <= row["acceptance"] <= 1 <= row["tokens_per_verify"]
    assert min(row["speedup"], row["speedup_cpu"]) > 0


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"speculate": "off"}, "speculate='off' is what drafts are compared with"),
        ({"rows": ()}, r"rows=\[\] must be numbers above 0"),
        ({"drafts": 0}, "drafts=0 must be at least 1"),
    ],
)
def test_mistakes_are_named(keys: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        BenchConfig(**keys)
