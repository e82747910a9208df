"""The benchmark of the rollout engine says what the engine did."""

import asyncio
import json

import pytest
from refusals import refused

from experiments.bench_rollout import BenchConfig, Sizes, main, measured, places_of
from experiments.models import resolve

KEYS = {
    "tokens_out", "seconds", "tokens_per_second", "prefill_tokens", "cached_tokens", "acceptance",
    "ttft_p50", "ttft_p99", "itl_p50", "peak_rss_bytes",
}  # fmt: skip
SIZES = Sizes(slots=4, page=8, chunk=32, decode_steps=2)


def found(**keys: object) -> dict[str, object]:
    cfg = BenchConfig(
        model="micro", requests=4, group=2, prefix=16, own=5, new_tokens=4, repeat=1,
        engine=SIZES, **keys,
    )  # fmt: skip
    return asyncio.run(measured(cfg, resolve("micro")))


def test_cores_have_the_same_number_of_slots() -> None:
    assert [places_of(64, cores) for cores in (1, 2, 16)] == [1, 2, 2]
    assert [places_of(96, cores) for cores in (2, 4)] == [2, 3]
    assert places_of(8, 4) == 1


def test_a_group_computes_its_prefix_once() -> None:
    told = found()
    assert told.keys() >= KEYS
    assert told["tokens_out"] == 4 * 4
    assert told["prompt_tokens"] == 4 * 21
    # Two prefixes, and of every prompt its own but the last, which is fed by decoding.
    assert told["prefill_tokens"] == 2 * 16 + 4 * 4
    assert told["cached_tokens"] == 2 * 16
    assert told["programs_traced"] == 0
    assert told["acceptance"] is None


def test_without_a_cache_everything_is_computed() -> None:
    told = found(prefix_cache=False)
    assert told["prefill_tokens"] == 4 * 20
    assert told["cached_tokens"] == 0


def test_turns_go_on_from_what_is_cached() -> None:
    told = found(turns=2, observation=6)
    assert told["tokens_out"] == 2 * 4 * 4
    assert told["prompt_tokens"] == 4 * (21 + 31)
    # Of the second prompt at least the three full pages of the first call.
    assert told["cached_tokens"] >= 2 * 16 + 4 * 24
    assert told["prefill_tokens"] + told["cached_tokens"] == 4 * (20 + 30)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("requests=0", "requests=0 must be at least 1"),
        ("engine.page=7", "chunk=256 must be whole pages of 7"),
        ("new_token=3", "new_token"),
    ],
)
def test_mistakes_are_named(key: str, said: str) -> None:
    assert said in refused(main, "model=micro", key)


def test_the_defaults_are_those_of_the_file() -> None:
    from omegaconf import OmegaConf

    from experiments.command import CONFIGS
    from forge_jax.config import load

    mapping = OmegaConf.to_container(OmegaConf.load(f"{CONFIGS}/bench_rollout.yaml"))
    assert isinstance(mapping, dict)
    del mapping["defaults"]
    assert json.dumps(load(BenchConfig, mapping).rollout.slots) == "64"
    assert load(BenchConfig, mapping) == BenchConfig()
