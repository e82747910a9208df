"""Walls hold: an episode writes, sees, signals and reaches nothing but its own."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from black_box_play import PYTHON, World, config, episode

from forge_jax.agents.black_box import inside
from forge_jax.agents.sandbox import Sandbox, problem_of, sandbox_of
from forge_jax.config import UserError
from forge_jax.programs import SandboxConfig

KINDS = [kind for kind in ("bwrap", "namespaces") if problem_of(Sandbox(kind=kind)) is None]
pytestmark = pytest.mark.skipif(not KINDS, reason="no sandbox works on this machine")
EACH = pytest.mark.parametrize("kind", KINDS)


def printed(script: str, **sandbox: object) -> str:
    world = World()
    outcome = episode(config(command=[*PYTHON, script], sandbox=sandbox), world)
    assert outcome.valid, outcome.error
    return world.seen[0].strip()


@EACH
def test_only_the_own_folder_can_be_written(kind: str, tmp_path: Path) -> None:
    here = Path(__file__).parent
    script = f"""
import os
for place in {[str(here), "/", os.path.expanduser("~"), "/usr"]!r}:
    try:
        open(place + "/written", "w")
    except OSError:
        continue
    print("could write", place)
for place in (".", os.environ["HOME"], os.environ["TMPDIR"], "/tmp", "/dev/shm"):
    open(place + "/written", "w")
print(os.listdir({str(tmp_path.parent.parent)!r}) if os.path.exists({str(tmp_path)!r}) else "gone")
"""
    assert printed(script, kind=kind) == "gone"
    assert not Path("/tmp/written").exists()


@EACH
def test_no_other_process_is_seen(kind: str) -> None:
    script = "import os; print(sum(name.isdigit() for name in os.listdir('/proc')))"
    assert int(printed(script, kind=kind)) <= 4
    lost = f"import os\ntry: os.kill({os.getpid()}, 0)\nexcept OSError: print('none such')"
    assert printed(lost, kind=kind) == "none such"


@EACH
def test_no_capability_is_left_and_it_is_not_root(kind: str) -> None:
    script = (
        "import os; lines = open('/proc/self/status').read().splitlines()\n"
        "print(os.getuid(), *(line.split()[1] for line in lines if line[:6] in "
        "('CapPrm', 'CapEff', 'CapAmb', 'NoNewP')))"
    )
    assert printed(script, kind=kind) == "1000 " + "0000000000000000 " * 3 + "1"


@contextmanager
def server() -> Iterator[int]:
    """A port of the host's loopback that says "host" to whoever connects."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    near, _ = listener.accept()
                except OSError:
                    return
                with near:
                    near.sendall(b"host")

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)


@EACH
@pytest.mark.parametrize("network", ["gateway", "host"])
def test_the_network_is_what_is_asked_for(kind: str, network: str) -> None:
    with server() as port:
        script = (
            "import socket\n"
            f"try: print(socket.create_connection(('127.0.0.1', {port}), 5).recv(9).decode())\n"
            "except OSError as error: print(type(error).__name__)"
        )
        reached = printed(script, kind=kind, network=network)
    assert reached == {"gateway": "ConnectionRefusedError", "host": "host"}[network]


@EACH
def test_what_is_hidden_is_empty_and_what_is_shown_is_read_only(kind: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("shown")
    hidden = Path(__file__).parent
    script = f"""
import os
print(os.listdir({str(hidden)!r}), open({str(tmp_path / "f")!r}).read())
try: open({str(tmp_path / "g")!r}, "w")
except OSError: print("read-only")
"""
    seen = printed(script, kind=kind, hide=[str(hidden)], show=[str(tmp_path)])
    assert seen.split("\n") == ["[] shown", "read-only"]


def test_a_kind_that_does_not_work_here_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    problem_of.cache_clear()
    try:
        with pytest.raises(UserError, match=r"agent.sandbox.kind=namespaces.*no unshare"):
            sandbox_of(SandboxConfig(kind="namespaces"))
        assert sandbox_of(SandboxConfig()).kind == "none"
    finally:
        problem_of.cache_clear()


def test_a_kind_whose_walls_cannot_be_built_does_not_work() -> None:
    assert problem_of(Sandbox(kind=KINDS[-1], show=("/tmp/no-such-path",))) is not None


def test_a_relay_does_not_stand_in_for_a_certificate() -> None:
    box = Sandbox(kind="namespaces")
    assert inside("http://10.0.0.1/s/a/v1", box) == "http://127.0.0.1:40080/s/a/v1"
    assert inside("http://host:8000/v1", Sandbox(kind="none")) == "http://host:8000/v1"
    with pytest.raises(UserError, match="https://api"):
        inside("https://api/v1", box)
