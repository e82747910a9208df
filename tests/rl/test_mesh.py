"""On a mesh an update is what it is on one device, and the state stays cut as it was."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding
from small_policy import MODEL, packed, parameters
from synthetic import accidents

from forge_jax.config import OptimConfig, UserError
from forge_jax.models.layout import layout
from forge_jax.rl.forward import StepConfig
from forge_jax.rl.parallel import update
from forge_jax.rl.state import create
from forge_jax.sharding import make_mesh, shardings

CFG = StepConfig(model=MODEL, ratio_cap=1.5, dtype="float64")


def placements(tree: Any) -> list[Any]:
    return [x.sharding for x in jax.tree.leaves(tree)]


def test_updates_on_a_mesh_are_those_of_one_device() -> None:
    samples = accidents(0, MODEL.vocab)
    trees = packed(samples, "tree", budget=40)
    assert len(trees) > 1
    with jax.enable_x64(True):
        where = shardings(layout(MODEL), make_mesh(fsdp=2, tensor=2))
        one = create(parameters("float64"), CFG.optim)
        cut = create(jax.device_put(parameters("float64"), where), CFG.optim)
        before = placements(cut)
        for _ in range(2):
            one, wanted = update(one, trees, CFG)
            cut, found = update(cut, trees, CFG)
            assert placements(cut) == before
            assert found.loss == pytest.approx(wanted.loss, rel=1e-10)
            assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-10)
            np.testing.assert_allclose(found.logp, wanted.logp, rtol=1e-10)
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-9), cut, one)


def test_moments_lie_where_their_parameters_do() -> None:
    mesh = make_mesh(fsdp=2, tensor=2)
    where = shardings(layout(MODEL), mesh)
    state = create(jax.device_put(parameters(), where), OptimConfig(warmup_steps=2))
    assert placements(state.params) == jax.tree.leaves(where)
    assert placements(state.opt_state[1][0].mu) == placements(state.params)
    assert placements(state.opt_state[1][0].nu) == placements(state.params)
    counters = [x.sharding for x in jax.tree.leaves(state) if x.ndim == 0]
    assert counters == [NamedSharding(mesh, jax.P())] * 3


def test_a_mesh_beyond_the_devices_is_refused() -> None:
    with pytest.raises(UserError, match="fsdp=4 tensor=4 needs 16 devices, found 8"):
        make_mesh(fsdp=4, tensor=4)


def test_what_the_mesh_does_not_divide_is_whole() -> None:
    odd = dataclasses.replace(MODEL, heads=3, kv_heads=3)
    where = shardings(layout(odd), make_mesh(fsdp=2, tensor=2))
    assert where["layers"]["q"].spec == jax.P(None, "fsdp", None, None)
    assert where["unembed"].spec == jax.P("fsdp", None)


def test_a_place_of_the_slice_axis_is_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("libtpu", reason="libtpu, the compiler for TPUs, is not installed")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    devices = topologies.get_topology_desc("v5e:2x2", platform="tpu", num_slices=2).devices
    mesh = make_mesh(slice=2, fsdp=2, tensor=2, devices=devices[::-1])
    of = np.vectorize(lambda device: device.slice_index)(mesh.devices).reshape(2, -1)
    assert {tuple(set(row)) for row in of.tolist()} == {(0,), (1,)}
    with pytest.raises(UserError, match="slice=4 needs 4 slices of 1 devices, found 2 of 4"):
        make_mesh(slice=4, devices=devices)
