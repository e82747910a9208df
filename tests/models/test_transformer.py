"""Laws of the transformer: what may change its output, and what may not."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import SMALL, causal, dense, draw_tokens, forward, states, weights

from forge_jax.models.config import ModelConfig
from forge_jax.models.layout import init, layout, unstack
from forge_jax.models.transformer import hidden, logits, unembedding
from forge_jax.sharding import automatic, make_mesh, shardings
from forge_jax.trees import Param, is_param

LENGTH = 8
head = jax.jit(logits, static_argnames="cfg")


@pytest.fixture(scope="module")
def params() -> Any:
    return weights(SMALL)


def host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def close(a: Any, b: Any, atol: float = 1e-5) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=atol), host(a), host(b))


def cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x).astype(dtype)), tree)


def test_fresh_parameters_are_as_described() -> None:
    params, described = host(init(SMALL, jax.random.key(0))), layout(SMALL)

    def check(p: Param, x: np.ndarray) -> None:
        assert x.shape == p.shape
        assert len(p.axes) == len(p.shape)
        if p.std == 0:
            assert (x == 1).all()
        else:
            assert abs(x.std() / p.std - 1) < 5 / np.sqrt(x.size)

    jax.tree.map(check, described, params, is_leaf=is_param)
    narrow = host(init(SMALL, jax.random.key(0), jnp.bfloat16))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype(b.dtype), b), params, narrow)
    gate, up = params["layers"]["gate"], params["layers"]["up"]
    assert not np.allclose(gate, up)
    assert not np.allclose(gate[0], gate[1])


def test_a_tied_model_has_no_output_matrix_of_its_own() -> None:
    cfg = dataclasses.replace(SMALL, tied=True)
    assert set(layout(SMALL)) - set(layout(cfg)) == {"unembed"}
    params = weights(cfg)
    np.testing.assert_array_equal(unembedding(params, cfg), params["embed"].T)


@functools.partial(jax.jit, static_argnames="remat")
def loss_and_gradient(params: Any, tokens: Any, remat: str) -> Any:
    def loss(p: Any) -> Any:
        return jnp.sum(jnp.sin(forward(p, tokens, SMALL, remat)))

    return jax.value_and_grad(loss)(params)


@pytest.mark.parametrize("seed", range(3))
def test_scan_loop_and_recomputation_are_one_function(params: Any, seed: int) -> None:
    tokens = draw_tokens(SMALL, LENGTH, seed=seed)
    loss, gradient = loss_and_gradient(params, tokens, "none")
    expected = loss, host(gradient)
    close(loss_and_gradient(params, tokens, "block"), expected, 2e-4)
    loss, gradient = loss_and_gradient(unstack(params, SMALL), tokens, "block")
    gradient["layers"] = jax.tree.map(lambda *x: np.stack(x), *host(gradient["layers"]))
    close((loss, gradient), expected, 2e-4)


def test_angles_are_computed_once_for_all_layers(params: Any) -> None:
    ready, tokens = unstack(params, SMALL), jnp.zeros((2, 5), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(5), tokens.shape)
    program = jax.jit(functools.partial(states, sees=causal(5), cfg=SMALL))
    text = program.lower(ready, tokens, positions).compile().as_text()
    assert text.count(" cosine(") == 1 < SMALL.layers


def test_an_unknown_recomputation_policy_is_refused(params: Any) -> None:
    tokens = draw_tokens(SMALL, LENGTH)
    with pytest.raises(ValueError, match="remat='all'"):
        forward(params, tokens, SMALL, "all")


def test_leading_dimensions_are_independent_sequences(params: Any) -> None:
    tokens = draw_tokens(SMALL, 2, 3, LENGTH)
    batched = forward(params, tokens, SMALL)
    assert batched.shape == (2, 3, LENGTH, SMALL.vocab)
    for i in np.ndindex(2, 3):
        close(batched[i], forward(params, tokens[i], SMALL))


def append_and_attend(q: Any, k: Any, v: Any, cache: Any) -> tuple[Any, Any]:
    """One token attends to a cache (keys, values, count), itself appended."""
    keys, values, count = cache
    keys = jax.lax.dynamic_update_index_in_dim(keys, k[0], count, 0)
    values = jax.lax.dynamic_update_index_in_dim(values, v[0], count, 0)
    o, _ = dense(jnp.arange(len(keys)) <= count)(q, keys, values, None)
    return o, (keys, values, count + 1)


@jax.jit
def decode(params: Any, cache: Any, token: Any, position: Any) -> tuple[Any, Any]:
    h, cache, _ = hidden(params, token[None], position[None], append_and_attend, SMALL, cache)
    return logits(params, h[0], SMALL), cache


@pytest.mark.parametrize("stacked", [True, False])
def test_decoding_token_by_token_equals_the_whole_sequence(params: Any, stacked: bool) -> None:
    room = np.zeros((SMALL.layers, LENGTH, SMALL.kv_heads, SMALL.head_dim), np.float32)
    empty: Any = (room, room, np.zeros(SMALL.layers, np.int32))
    if not stacked:
        empty = tuple((room[i], room[i], np.int32(0)) for i in range(SMALL.layers))
    model = params if stacked else unstack(params, SMALL)
    for seed in range(3):
        tokens, cache, decoded = draw_tokens(SMALL, LENGTH, seed=seed), empty, []
        for i, token in enumerate(tokens):
            out, cache = decode(model, cache, token, np.int32(i))
            decoded.append(out)
        close(np.stack(decoded), forward(params, tokens, SMALL))


def test_a_tree_is_read_by_depth_and_not_by_index(params: Any) -> None:
    """Two branches after a shared prefix, in one depth-first row, equal the two paths."""
    tokens = draw_tokens(SMALL, 14)
    depth = np.array([0, 1, 2, *range(3, 8), 2, *range(3, 8)])
    end = np.array([14, 14, *[8] * 6, *[14] * 6])
    i, j = np.indices((14, 14))
    sees = (j <= i) & (i < end[j])
    h = states(params, tokens, depth, sees, SMALL)
    for path in ([0, 1, *range(2, 8)], [0, 1, *range(8, 14)]):
        close(head(params, h[np.array(path)], SMALL), forward(params, tokens[path], SMALL))
    by_index = states(params, tokens, np.arange(14), sees, SMALL)
    assert np.abs(by_index - h)[8:].max() > 1e-2


def test_only_relative_positions_matter(params: Any) -> None:
    tokens, order = draw_tokens(SMALL, LENGTH), np.arange(LENGTH)
    here = states(params, tokens, order, causal(LENGTH), SMALL)
    close(here, states(params, tokens, order + 31, causal(LENGTH), SMALL), 1e-4)
    stretched = states(params, tokens, order * 2, causal(LENGTH), SMALL)
    assert np.abs(here - stretched).max() > 1e-2


def test_double_precision_is_double_throughout(params: Any) -> None:
    """A far shift of positions leaves fp64 logits equal far beyond what fp32 can hold."""
    tokens, order = draw_tokens(SMALL, LENGTH), np.arange(LENGTH)
    with jax.enable_x64(True):
        wide = cast(params, np.float64)
        out = forward(wide, tokens, SMALL)
        h = states(wide, tokens, order + 1000, causal(LENGTH), SMALL)
        shifted = head(wide, h, SMALL)
    assert out.dtype == h.dtype == shifted.dtype == np.float64
    close(out, shifted, 1e-10)
    close(out, forward(params, tokens, SMALL), 1e-3)


def test_half_precision_keeps_norms_and_logits_in_fp32(params: Any) -> None:
    tokens, order = draw_tokens(SMALL, LENGTH), np.arange(LENGTH)
    half = cast(params, jnp.bfloat16)
    h = states(half, tokens, order, causal(LENGTH), SMALL)
    out = head(half, h, SMALL)
    assert (h.dtype, out.dtype) == (jnp.bfloat16, jnp.float32)
    # Products and sums of bf16 numbers, themselves not rounded to bf16.
    close(out, np.asarray(h, np.float64) @ np.asarray(half["unembed"], np.float64), 1e-4)
    # The squares of these embeddings are beyond fp16's largest number.
    large = cast(params, np.float16)
    large["embed"] = cast(np.asarray(large["embed"]) + 300, np.float16)
    h = states(large, tokens, order, causal(LENGTH), SMALL)
    wide = states(cast(large, np.float32), tokens, order, causal(LENGTH), SMALL)
    close(np.asarray(h, np.float32), wide, 0.1)
    assert np.abs(wide).max() > 0.5


def test_sharded_parameters_give_the_same_logits(params: Any) -> None:
    mesh = make_mesh(fsdp=2, tensor=2)
    placed = jax.device_put(params, jax.tree.map(automatic, shardings(layout(SMALL), mesh)))
    assert placed["layers"]["q"].sharding.spec == jax.P(None, "fsdp", "tensor", None)
    tokens = draw_tokens(SMALL, LENGTH)
    close(forward(placed, tokens, SMALL), forward(params, tokens, SMALL))


@pytest.mark.parametrize(
    ("field", "value"),
    [("layers", 0), ("kv_heads", 3), ("head_dim", 7), ("family", "gpt2"), ("norm_eps", 0.0)],
)
def test_sizes_that_do_not_fit_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field}={value!r}"):
        dataclasses.replace(SMALL, **{field: value})


def test_equal_configs_are_one_static_argument() -> None:
    assert hash(SMALL) == hash(ModelConfig(**dataclasses.asdict(SMALL)))
