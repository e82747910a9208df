"""Stop strings are found in the text, however the tokens were cut into calls."""

import random

import numpy as np
import pytest

from forge_jax.config import CertainConfig
from forge_jax.models.tokenizer import ByteTokenizer
from forge_jax.rollout.jobs import Limits, job_of
from forge_jax.rollout.packets import EXHAUSTED, GOES_ON, RAW, SAMPLED, STATUS, STOPPED
from forge_jax.rollout.reading import cut
from forge_jax.rollout.stop import StopStrings, certain_run
from forge_jax.types import Finish, Request, Sampling


def kept(strings: tuple[str, ...], calls: list[list[int]]) -> tuple[list[int], str | None]:
    """Tokens kept of a stream, and the string that ended it."""
    watch = StopStrings(strings, ByteTokenizer())
    tokens: list[int] = []
    for ids in calls:
        found = watch.feed(ids)
        if found is not None:
            return [*tokens, *ids[: found[0]]], found[1]
        tokens += ids
    return tokens, watch.flush()


@pytest.mark.parametrize("seed", range(20))
def test_every_cutting_of_a_stream_keeps_the_same_tokens(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("abé€") for _ in range(40))
    ids = ByteTokenizer().encode(text)
    stops = tuple(text[i : i + rng.randrange(1, 5)] for i in rng.choices(range(5, 40), k=2))
    first_end = min(text.index(s) + len(s) for s in stops)
    whole = kept(stops, [ids])
    assert whole[0] == ByteTokenizer().encode(text[:first_end])
    assert whole[1] in stops
    assert ByteTokenizer().decode(whole[0]).endswith(whole[1])
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(ids) + 1), k=rng.randrange(8)))
        calls = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
        assert kept(stops, calls) == whole


def test_a_string_that_is_not_there_keeps_everything() -> None:
    ids = ByteTokenizer().encode("abcabd")
    assert kept(("abe", "cc"), [ids[:2], ids[2:]]) == (ids, None)


def test_a_string_may_sit_in_what_only_the_end_makes_certain() -> None:
    half = "é".encode()[0]
    assert kept(("a\ufffd",), [[97], [half]]) == ([97, half], "a\ufffd")


@pytest.mark.parametrize("seed", range(10))
def test_a_run_of_certain_tokens_ends_at_its_last_however_it_is_cut(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logprobs = np.log(rng.choice([0.5, 0.995], 40, p=[0.2, 0.8])).astype(np.float32)
    runs, ends = 0, []
    for place, logprob in enumerate(logprobs):
        runs = runs + 1 if logprob > np.log(0.99) else 0
        ends += [place + 1] * (runs >= 6)
    watch = certain_run(CertainConfig(tokens=6))
    assert watch is not None
    read, found = 0, None
    while found is None and read < len(logprobs):
        part = logprobs[read : read + int(rng.integers(1, 8))]
        found = watch.feed(part)
        read += len(part) if found is None else found
    assert (read if found is not None else None) == (ends[0] if ends else None)
    assert certain_run(CertainConfig()) is None


@pytest.mark.parametrize("last", [GOES_ON, STOPPED, EXHAUSTED])
def test_a_completion_that_loops_is_cut_off_as_one_at_its_limit(last: int) -> None:
    request = Request(prompt=np.ones(3, np.int32), sampling=Sampling())
    limits = Limits(context=32, vocab=9, stop_ids=(1,))
    packet = np.zeros((6, 4), np.int32)
    packet[:, SAMPLED], packet[:, STATUS] = 2 + np.arange(6), GOES_ON
    packet[-1, STATUS] = last
    packet[:, RAW] = np.log(np.float32([0.5, *[0.999] * 5])).view(np.int32)

    def ends(tokens: int) -> tuple[list[int], Finish | None]:
        job = job_of(request, limits, 0, (0, 0), None, 0.0)
        job.certain = certain_run(CertainConfig(tokens=tokens))
        kept, finish, _ = cut(job, packet)
        return kept[:, SAMPLED].tolist(), finish

    by_itself = {GOES_ON: None, STOPPED: Finish.STOP, EXHAUSTED: Finish.LENGTH}[last]
    assert ends(4) == ([2, 3, 4, 5, 6], Finish.LENGTH)
    assert ends(5) == ([2, 3, 4, 5, 6, 7], by_itself or Finish.LENGTH)
    assert ends(6) == ends(0) == ([2, 3, 4, 5, 6, 7], by_itself)
