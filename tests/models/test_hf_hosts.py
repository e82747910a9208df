"""Two processes, as on two hosts, share a model: each reads what its devices hold, and the
first writes what both hold; what it refuses, both refuse."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from small_model import SPARSE, same, weights

from forge_jax.models.hf import export_folder, import_folder

HOST = """
import json, sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
port, number, folder, again, taken = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", 2, int(number))
from small_model import SPARSE
from forge_jax.config import UserError
from forge_jax.models.hf import export_folder, import_folder
from forge_jax.models.hf_files import Tensors
from forge_jax.models.layout import layout
from forge_jax.sharding import make_mesh, shardings
read, sizes = Tensors.read, {}
def counted(self, name, window):
    value = read(self, name, window)
    sizes[name] = sizes.get(name, 0) + value.nbytes
    return value
Tensors.read = counted
where = shardings(layout(SPARSE), make_mesh(fsdp=2, expert=2))
cfg, params = import_folder(folder, shardings=where)
export_folder(again, cfg, params, max_shard_bytes=20_000)
try:  # before anything is gathered, and for what the first host's folder holds
    export_folder(f"{taken}{number if number != '0' else ''}", cfg, params)
    refused = None
except UserError as error:
    refused = str(error)
print(json.dumps([sizes, refused]))
"""


@pytest.mark.slow
def test_hosts_read_their_parts_and_the_first_writes_them_all(tmp_path: Path) -> None:
    params = weights(SPARSE)
    export_folder(tmp_path / "model", SPARSE, params)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    room = Path(__file__).parent
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (room, room.parent.parent))),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    folders = [str(tmp_path / name) for name in ("model", "again", "taken")]
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("years of work")
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", HOST, port, str(number), *folders],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        told = [json.loads(host.communicate(timeout=300)[0].splitlines()[-1]) for host in hosts]
    finally:
        for host in hosts:
            host.kill()  # one waits for ever where the other has failed
    said, refused = zip(*told, strict=True)
    assert refused == (f"{folders[2]}: exists and holds 'thesis.txt', not only an export",) * 2
    assert not (tmp_path / "taken1").exists()
    cfg, back = import_folder(tmp_path / "again")
    assert cfg == SPARSE
    same(back, params)
    layer = "model.layers.1.mlp"
    query = "model.layers.1.self_attn.q_proj.weight"
    whole = SPARSE.embed * SPARSE.heads * SPARSE.head_dim * 4
    assert [sizes[query] for sizes in said] == [whole / 2] * 2
    # Devices (fsdp, expert) of a host: one place along fsdp, both along the experts' axis.
    for expert in range(SPARSE.experts):
        gate = f"{layer}.experts.{expert}.gate_proj.weight"
        assert [sizes[gate] for sizes in said] == [SPARSE.embed * SPARSE.ffn * 4 / 2] * 2
    assert all(sizes["model.norm.weight"] == SPARSE.embed * 4 for sizes in said)
