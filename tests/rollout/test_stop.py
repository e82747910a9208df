"""Stop strings are found in the text, however the tokens were cut into calls."""

import random

import pytest

from forge_jax.models.tokenizer import ByteTokenizer
from forge_jax.rollout.stop import StopStrings


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
