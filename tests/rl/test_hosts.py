"""Two processes, as on two hosts, compute the update that one device does."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_policy import MODEL, packed, parameters
from synthetic import agentic

from forge_jax.rl import step
from forge_jax.rl.forward import StepConfig

CFG = StepConfig(model=MODEL, ratio_cap=1.5)
HOST = """
import json, sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
from small_policy import MODEL, parameters
from test_hosts import CFG, trees
from forge_jax.models.layout import layout
from forge_jax.rl import parallel
from forge_jax.sharding import make_mesh, shardings
assert (jax.process_count(), jax.local_device_count()) == (2, 2)
mesh = make_mesh(data=2, context=2)
params = jax.device_put(parameters(), shardings(layout(MODEL), mesh))
found = parallel.gather(params, trees(), CFG)
norm = float(jax.numpy.linalg.norm(found.grads["unembed"]))
print(json.dumps({"loss": found.loss, "norm": norm, "logp": float(found.logp.sum())}))
"""


def trees() -> list:
    return [tree for seed in range(2) for tree in packed(agentic(seed, MODEL.vocab), "tree")]


@pytest.mark.slow
def test_two_hosts_compute_what_one_device_does() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    room = Path(__file__).parent
    path = os.pathsep.join(map(str, (room, room.parent, room.parent.parent)))
    flags = "--xla_force_host_platform_device_count=2"
    env = os.environ | {"PYTHONPATH": path, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", HOST, port, str(number)],
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
    one = step.gather(parameters(), trees(), CFG)
    wanted = {
        "loss": one.loss,
        "norm": float(np.linalg.norm(one.grads["unembed"])),
        "logp": float(one.logp.sum()),
    }
    for found in said:
        assert found == pytest.approx(wanted, rel=1e-5)
