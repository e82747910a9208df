"""Laws of shaped sampling: exactly the distribution a plain computation gives, row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forge_jax.drawing import CLOSED, LOST, OPEN
from forge_jax.rollout.sampling import sample
from forge_jax.rollout.shaped import Draws, Told, draw
from forge_jax.rollout.shaping import WINDOW, Settings, history_of

VOCAB, ROWS, STOPS = 300, 12, 2
TOLD = Told(top=5, support=32)
NEUTRAL = {
    "top_k": 0, "top_p": 1.0, "min_p": 0.0, "presence": 0.0, "frequency": 0.0, "repetition": 1.0,
    "stop_from": 0, "bias": {}, "allowed": range(VOCAB),
}  # fmt: skip
CASES = {
    "plain": {},
    "top_k": {"top_k": 7},
    "wide top_k": {"top_k": WINDOW + 9},
    "top_p": {"top_p": 0.6},
    "wide top_p": {"top_p": 0.9999},
    "min_p": {"min_p": 0.1},
    "all three": {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
    "penalties": {"presence": 0.7, "frequency": 0.4},
    "repetition": {"repetition": 1.7},
    "bias": {"bias": {3: 4.0, 9: -100.0, 250: 1.5}},
    "early": {"stop_from": 50},
    "few": {"allowed": [5, 17, 33, 250]},
    "most": {"allowed": range(20, VOCAB)},
    "half": {"allowed": range(0, VOCAB, 2), "presence": 0.5},
    "one": {"allowed": [33], "top_k": 3},
    "early and last": {"stop_from": 50, "allowed": [5]},
    "everything": {
        "top_k": 11, "top_p": 0.9, "min_p": 0.01, "presence": -1.0, "frequency": 1.0,
        "bias": {41: 3.0}, "stop_from": 50,
    },
}  # fmt: skip
run = jax.jit(draw, static_argnames="told")


def settings_of(rows: list[dict]) -> Settings:
    rows = [NEUTRAL | row for row in rows]
    ids, bias = np.full((len(rows), 4), -1, np.int32), np.zeros((len(rows), 4), np.float32)
    for i, row in enumerate(rows):
        ids[i, : len(row["bias"])] = list(row["bias"])
        bias[i, : len(row["bias"])] = list(row["bias"].values())
    scalars = {
        name: np.array(
            [row[name] for row in rows],
            np.asarray(NEUTRAL[name]).dtype.char.replace("l", "i").replace("d", "f"),
        )
        for name in NEUTRAL
        if name not in ("bias", "allowed")
    }
    return Settings(**scalars, bias_ids=ids, bias=bias)


def inputs(rows: int = ROWS, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    sequences = rng.integers(0, VOCAB, (rows, 40)).astype(np.int32)
    sequences[:, 30:] = -1
    sequences[:, 20:24] = sequences[:, 25:29]  # some come twice
    words = rng.integers(0, 2**32, (rows, 2), np.uint32)
    return {
        "logits": rng.normal(0, 2, (rows, VOCAB)).astype(np.float32),
        "temperature": rng.choice([0.5, 1.0, 1.5], rows).astype(np.float32),
        "keys": jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32"),
        "position": np.full(rows, 30, np.int32),
        "history": history_of(jnp.asarray(sequences), jnp.full(rows, 10), VOCAB),
        "stop": np.tile(np.array([[5, -1]], np.int32), (rows, 1)),
        "sequences": sequences,
    }


def call(case: list[dict], given: dict, told: Told = TOLD) -> Draws:
    given = {name: x for name, x in given.items() if name != "sequences"}
    banned = np.ones((len(case), VOCAB), bool)
    for row, asked in zip(banned, case, strict=True):
        row[list((NEUTRAL | asked)["allowed"])] = False
    return run(**given, settings=settings_of(case), banned=banned, told=told)


def reference(case: dict, given: dict, row: int) -> np.ndarray:
    """Probabilities f64[V], by sorting everything."""
    s = NEUTRAL | case
    z = given["logits"][row].astype(np.float64)
    for token, bias in s["bias"].items():
        z[token] += bias
    tokens = given["sequences"][row][:30]
    for token in set(tokens.tolist()):
        z[token] = z[token] / s["repetition"] if z[token] > 0 else z[token] * s["repetition"]
    for token in tokens[10:]:
        z[token] -= s["frequency"]
    for token in set(tokens[10:].tolist()):
        z[token] -= s["presence"]
    if given["position"][row] < s["stop_from"] and [*s["allowed"]] != [5]:
        z[5] = -np.inf
    z[[token for token in range(VOCAB) if token not in s["allowed"]]] = -np.inf
    z /= given["temperature"][row]
    p = np.exp(z - z.max())
    p[p < s["min_p"]] = 0
    order = np.argsort(-p, kind="stable")
    if s["top_k"]:
        p[order[s["top_k"] :]] = 0
    p /= p.sum()
    if s["top_p"] < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= s["top_p"]]] = 0
    return p / p.sum()


@pytest.mark.parametrize("name", CASES)
def test_log_probs_and_supports_are_those_of_the_reference(name: str) -> None:
    given = inputs()
    found = jax.device_get(call([CASES[name]] * ROWS, given))
    for row in range(ROWS):
        p = reference(CASES[name], given, row)
        with np.errstate(divide="ignore"):
            logp = np.log(p)
        np.testing.assert_allclose(found.logp[row], logp[found.token[row]], atol=2e-5)
        likeliest = np.argsort(-p, kind="stable")[: TOLD.top]
        np.testing.assert_allclose(found.top_logprobs[row], logp[likeliest], atol=2e-5)
        kind = found.kind[row]
        listed = found.ids[row] >= 0
        if kind == CLOSED:
            assert set(found.ids[row][listed]) == set(np.flatnonzero(p))
        if kind != LOST:
            z = given["logits"][row].astype(np.float64)
            offset = np.full(VOCAB, 0.0 if kind == OPEN else -np.inf)
            offset[found.ids[row][listed]] = found.offsets[row][listed]
            z = (z + offset) / given["temperature"][row]
            np.testing.assert_allclose(
                np.exp(z - z.max()) / np.exp(z - z.max()).sum(), p, atol=1e-6
            )
        truncated = name.startswith(("top", "wide", "min", "all", "everything", "half"))
        many = truncated and np.count_nonzero(p) > TOLD.support
        assert (kind == LOST) == (many or name == "repetition")


@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_those_of_the_reference(name: str) -> None:
    count = 4096
    given = inputs(1, seed=1)
    p = reference(CASES[name], given, 0)
    many = {
        n: x if n == "keys" else jax.tree.map(lambda a: np.repeat(a, count, 0), x)
        for n, x in given.items()
    }
    words = np.random.default_rng(5).integers(0, 2**32, (count, 2), np.uint32)
    many["keys"] = jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")
    tokens = np.asarray(call([CASES[name]] * count, many).token)
    seen, want = np.bincount(tokens, minlength=VOCAB), count * p
    assert not seen[p == 0].any()
    likely = want > 5
    chi2 = np.sum((seen - want)[likely] ** 2 / want[likely])
    assert chi2 < likely.sum() + 5 * np.sqrt(2 * likely.sum())


def test_rows_do_not_see_one_another() -> None:
    given = inputs(len(CASES), seed=2)
    together = jax.device_get(call(list(CASES.values()), given))
    for row, case in enumerate(CASES.values()):
        alone = jax.tree.map(lambda x, row=row: jnp.repeat(x[row : row + 1], len(CASES), 0), given)
        once = jax.device_get(call([case] * len(CASES), alone))
        for a, b in zip(together, once, strict=True):
            np.testing.assert_array_equal(a[row], b[0])


def test_a_row_that_asks_for_nothing_draws_what_the_plain_sampler_draws() -> None:
    given = inputs(64, seed=3)
    given["temperature"][::4] = 0
    found = call([{}] * 64, given)
    token, logp = jax.jit(sample)(
        *(given[n] for n in ("logits", "temperature", "keys", "position"))
    )
    np.testing.assert_array_equal(found.token, token)
    np.testing.assert_array_equal(found.logp, logp)
    assert (np.asarray(found.kind) == OPEN).all()
    assert (np.asarray(found.ids) == -1).all()


def test_equally_likely_tokens_rank_by_their_ids() -> None:
    given = inputs()
    given["logits"][:] = 0
    found = call([{"top_k": 3, "top_p": 0.5}] * ROWS, given)
    assert {frozenset(ids[ids >= 0].tolist()) for ids in np.asarray(found.ids)} == {
        frozenset({0, 1})
    }
