"""Checkpoints restore bit for bit, are whole or absent, and say so when they are broken."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from small_policy import MODEL

from forge_jax.config import OptimConfig, UserError
from forge_jax.models.layout import init, layout
from forge_jax.rl.checkpoint import Checkpoints
from forge_jax.rl.state import TrainState, create
from forge_jax.rl.step import apply
from forge_jax.sharding import make_mesh, shardings

OPTIM = OptimConfig()


def state(seed: int = 0) -> TrainState:
    key = jax.random.key(seed)
    params = {"w": jax.random.normal(key, (3, 2)), "layers": {"b": jnp.arange(4.0)}}
    grads = jax.tree.map(jnp.ones_like, params)
    return apply(create(params, OPTIM), grads, OPTIM)


def test_state_and_cursors_come_back_exactly(tmp_path: Path) -> None:
    saved = state()
    host = {"cursors": {"head": 3, "ahead": [5, 7]}, "totals": {"seconds": 0.1}}
    first = Checkpoints(tmp_path)
    first.save(7, saved, host)
    first.close()
    again = Checkpoints(tmp_path)
    assert again.latest() == 7
    found, read = again.restore(7, state(seed=1))
    again.close()
    assert read == host
    jax.tree.map(np.testing.assert_array_equal, found, saved)


def test_a_checkpoint_comes_back_on_another_mesh(tmp_path: Path) -> None:
    saved, like = state(), state(seed=1)
    cut = NamedSharding(make_mesh(fsdp=2), jax.P("fsdp"))
    like = create({**like.params, "layers": jax.device_put(like.params["layers"], cut)}, OPTIM)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, saved, {})
    found, _ = checkpoints.restore(1, like)
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, found, saved)
    assert [x.sharding for x in jax.tree.leaves(found)] == [
        x.sharding for x in jax.tree.leaves(like)
    ]


def test_a_step_that_is_not_the_newest_is_not_dropped_silently(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, state(), {})
    for step in (2, 3):
        with pytest.raises(ValueError, match=f"step={step} is not after 3"):
            checkpoints.save(step, state(), {})
    checkpoints.close()


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, state(), {"step": step})
    assert checkpoints.latest() == 3
    checkpoints.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3"]


def test_a_corrupt_checkpoint_is_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(4, state(), {})
    for file in (tmp_path / "4" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"\x00" * 8)
    with pytest.raises(UserError, match=f"checkpoint {tmp_path}/4 cannot be read"):
        checkpoints.restore(4, state())
    checkpoints.close()


def test_a_checkpoint_of_other_shapes_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(), {})
    other = create({"w": jnp.zeros((5, 2)), "layers": {"b": jnp.arange(4.0)}}, OPTIM)
    with pytest.raises(UserError, match=r"mu\.w is \(3, 2\) there, \(5, 2\) here"):
        checkpoints.restore(1, other)
    checkpoints.close()


def test_a_state_goes_from_layout_to_layout(tmp_path: Path) -> None:
    def fresh(seed: int, **axes: int) -> TrainState:
        where = shardings(layout(MODEL), make_mesh(**axes))
        return create(jax.device_put(init(MODEL, jax.random.key(seed)), where), OPTIM)

    state = fresh(0, fsdp=8)
    saved = apply(state, jax.tree.map(jnp.ones_like, state.params), OPTIM)
    wanted = jax.device_get(saved)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, saved, {})
    for axes in ({"fsdp": 4, "tensor": 2}, {}):
        like = fresh(1, **axes)
        found, _ = checkpoints.restore(1, like)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), wanted)
        assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding == y.sharding, found, like))
    checkpoints.close()
