"""Two processes, as on two hosts, compute the updates that one does, and share its checkpoints."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_policy import MODEL, packed
from synthetic import agentic

from forge_jax.models.layout import init, layout
from forge_jax.rl import parallel
from forge_jax.rl.checkpoint import Checkpoints
from forge_jax.rl.forward import StepConfig
from forge_jax.rl.state import TrainState, create
from forge_jax.sharding import make_mesh, put, shardings

EXPERTS = dataclasses.replace(
    MODEL, family="qwen3_moe", experts=4, experts_per_token=2, ffn=8, tied=True
)
DENSE = StepConfig(model=MODEL, ratio_cap=1.5, attention="reference")
SPARSE = dataclasses.replace(DENSE, model=EXPERTS)
# Each with an axis that goes over both hosts.
RUNS = [
    (DENSE, {"fsdp": 4, "tensor": 2}),
    (SPARSE, {"slice": 2, "expert": 2, "context": 2}),
]
HOST = """
import json, sys
from forge_jax.config import HostsConfig
from forge_jax.sharding import join
join(HostsConfig(coordinator=f"localhost:{sys.argv[1]}", processes=2, process=int(sys.argv[2])))
import jax
from pathlib import Path
from test_hosts import everything
assert (jax.process_count(), jax.local_device_count()) == (2, 4)
print(json.dumps(everything(Path(sys.argv[3]), "two", "one")))
"""


def trees() -> list:
    return [tree for seed in range(2) for tree in packed(agentic(seed, MODEL.vocab), "tree")]


def fresh(cfg: StepConfig, axes: dict[str, int], seed: int = 1) -> TrainState:
    where = shardings(layout(cfg.model), make_mesh(**axes))
    return create(put(init(cfg.model, jax.random.key(seed)), where), cfg.optim)


def numbers(tree: Any) -> list[float]:
    """Two numbers for every array."""
    return np.ravel(_numbers(tree)).tolist()


@jax.jit
def _numbers(tree: Any) -> jax.Array:
    flat = jax.tree.leaves(tree)
    return jnp.stack([jnp.stack([jnp.sum(x) * 1.0, jnp.sum(jnp.square(x)) * 1.0]) for x in flat])


def everything(folder: Path, saved: str, found: str) -> dict[str, Any]:
    """An update on every mesh; the last state is saved as `saved`, and `found` is restored, where
    it is there, into another layout."""
    said: dict[str, Any] = {}
    for number, (cfg, axes) in enumerate(RUNS):
        state = fresh(cfg, axes)
        grads = numbers(parallel.gather(state.params, trees(), cfg).grads)
        state, done = parallel.update(state, trees(), cfg)
        said[str(number)] = [done.loss, done.grad_norm, float(done.logp.sum()), *grads]
        said[f"state {number}"] = numbers(state)
    with closing(Checkpoints(folder / saved)) as checkpoints:
        checkpoints.save(1, state, {"by": saved})
    if (folder / found).exists():
        with closing(Checkpoints(folder / found)) as checkpoints:
            like = fresh(SPARSE, {"data": 2, "tensor": 2, "context": 2}, seed=2)
            restored, host = checkpoints.restore(1, like)
        said["restored"] = numbers(restored)
        assert host == {"by": found}
    return said


@pytest.mark.slow
def test_two_hosts_compute_what_one_does_and_read_what_it_wrote(tmp_path: Path) -> None:
    alone = everything(tmp_path, "one", "two")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    room = Path(__file__).parent
    path = os.pathsep.join(map(str, (room, room.parent, room.parent.parent)))
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    # Each compiles its own: one that finds what the other has yet to compile would run ahead.
    env = os.environ | {
        "PYTHONPATH": path,
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", HOST, port, str(number), str(tmp_path)],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        said = [json.loads(host.communicate(timeout=300)[0].splitlines()[-1]) for host in hosts]
    finally:
        for host in hosts:
            host.kill()  # one waits for ever where the other has failed
    assert said[0] == said[1]
    assert said[0].pop("restored") == pytest.approx(alone["state 1"], rel=1e-4, abs=1e-5)
    assert said[0].keys() == alone.keys()
    for name, values in alone.items():
        assert said[0][name] == pytest.approx(values, rel=1e-4, abs=1e-5), name
    with closing(Checkpoints(tmp_path / "two")) as checkpoints:
        restored, host = checkpoints.restore(1, fresh(SPARSE, {}, seed=2))
    assert host == {"by": "two"}
    assert numbers(restored) == pytest.approx(said[0]["state 1"], rel=1e-4, abs=1e-5)
