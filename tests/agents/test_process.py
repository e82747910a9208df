"""Whatever a program does, there is one outcome, and nothing of it is left."""

import asyncio
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from black_box_play import PYTHON, TASK, World, config, episode
from stand_in_server import replies, stand_in

from forge_jax.agents.black_box import black_box
from forge_jax.agents.runner import run_episode
from forge_jax.types import Outcome, Status

KINDS = pytest.mark.parametrize("kind", ["none", "auto"])
# A program that leaves its process group twice over, and says its mark to whoever lists processes.
SCATTER = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for number in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
        break
time.sleep(600)
"""


def mark() -> str:
    return f"mark-{uuid.uuid4().hex}"


def alive(name: str) -> list[str]:
    """Processes that have `name` in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if name in line and "defunct" not in line:
            found.append(line)
    return found


def python(script: str, *arguments: str) -> list[str]:
    return [*PYTHON, script, *arguments]


@KINDS
def test_a_program_that_will_not_end_is_killed_with_all_it_started(kind: str) -> None:
    name = mark()
    cfg = config(
        command=python(SCATTER, name),
        sandbox={"kind": kind},
        limits={"seconds": 0.7, "grace": 0.1},
    )
    outcome = episode(cfg, World())
    assert (outcome.status, outcome.error) == (Status.TIMED_OUT, "no end after 0.7 s")
    assert alive(name) == []


@KINDS
def test_what_a_program_left_running_dies_with_it(kind: str) -> None:
    name = mark()
    script = "import os, time\nif os.fork() == 0: os.setsid(); time.sleep(600)"
    cfg = config(command=python(script, name), sandbox={"kind": kind}, limits={"seconds": 20.0})
    assert episode(cfg, World()).valid
    assert alive(name) == []


def test_a_program_that_is_asked_to_end_may_say_goodbye() -> None:
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit('goodbye'))\n"
        "time.sleep(600)"
    )
    cfg = config(command=python(script), limits={"seconds": 0.5, "grace": 4.0})
    outcome = episode(cfg, World())
    assert outcome.status is Status.TIMED_OUT
    assert outcome.error.endswith("goodbye")


@KINDS
def test_an_endless_output_is_read_and_only_its_end_is_kept(kind: str) -> None:
    world = World()
    script = "import os\nfor _ in range(300): os.write(1, b'x' * 65536)\nos.write(1, b'end')"
    cfg = config(command=python(script), sandbox={"kind": kind}, limits={"output_bytes": 1000})
    outcome = episode(cfg, world)
    assert world.seen == ["x" * 997 + "end"]
    assert outcome.metrics["output_bytes"] == 300 * 65536 + 3


CRASHES = {
    "killed by SIGSEGV": "import os; os.kill(os.getpid(), 11)",
    "exit status 1": "raise SystemExit(1)",
    "killed by SIGKILL": "import os; os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize("error", CRASHES)
def test_a_crash_is_the_programs_failure(error: str) -> None:
    outcome = episode(config(command=python(CRASHES[error])), World())
    assert (outcome.status, outcome.error) == (Status.AGENT_FAILED, error)


@KINDS
def test_a_program_that_closes_what_it_was_given_still_ends_once(kind: str) -> None:
    script = "import os, time\nfor n in (0, 1, 2): os.close(n)\ntime.sleep(0.1)"
    assert episode(config(command=python(script), sandbox={"kind": kind}), World()).valid


def test_a_program_that_cannot_start_has_failed(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("no program")
    program.chmod(0o755)
    outcome = episode(config(command=[str(program)]), World())
    assert outcome.status is Status.AGENT_FAILED
    assert "did not start" in outcome.error
    assert "format" in outcome.error


@KINDS
def test_a_program_that_multiplies_is_ended(kind: str) -> None:
    name = mark()
    script = (
        "import os, sys, time\n"
        "for _ in range(150):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid(); time.sleep(600)\n"
        "time.sleep(600)"
    )
    cfg = config(command=python(script, name), sandbox={"kind": kind}, limits={"processes": 50})
    outcome = episode(cfg, World())
    assert (outcome.status, outcome.error) == (
        Status.AGENT_FAILED,
        "it had more than 50 processes",
    )
    assert alive(name) == []


LIMITS = {
    "cpu_seconds": (1, "while True: pass", "killed by SIG"),
    "memory_bytes": (200 << 20, "x = bytearray(400 << 20)", "MemoryError"),
    "file_bytes": (1000, "with open('f', 'wb') as file: file.write(b'x' * 2000)", "File too large"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_resources_are_limited(name: str) -> None:
    most, script, error = LIMITS[name]
    outcome = episode(config(command=python(script), limits={name: most}), World())
    assert outcome.status is Status.AGENT_FAILED
    assert error in outcome.error


@KINDS
def test_a_cancelled_run_leaves_nothing(kind: str) -> None:
    name = mark()
    cfg = config(command=python(SCATTER, name), sandbox={"kind": kind}, limits={"grace": 0.1})

    async def run() -> None:
        answer, _ = replies()
        async with stand_in(answer) as client:
            agent = black_box(cfg, lambda task: World())
            running = asyncio.create_task(run_episode(agent, TASK, client, "m", 60.0))
            while len(alive(name)) < 5:
                await asyncio.sleep(0.02)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(run())
    assert alive(name) == []


def test_an_episode_that_takes_too_long_for_its_run_has_timed_out() -> None:
    name = mark()
    cfg = config(command=python(SCATTER, name), limits={"grace": 0.1})
    outcome = episode(cfg, World(), seconds=0.6)
    assert (outcome.status, outcome.error) == (Status.TIMED_OUT, "no end after 0.6 s")
    assert alive(name) == []


@KINDS
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_a_trainer_that_is_gone(kind: str, number: int) -> None:
    name = mark()
    trainer = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from black_box_play import World, config, episode\n"
        f"episode(config(command={python(SCATTER, name)!r}, sandbox={{'kind': {kind!r}}}, "
        "limits={'grace': 0.1}), World())"
    )
    running = subprocess.Popen([sys.executable, "-c", trainer], stderr=subprocess.DEVNULL)
    scattered = 5 + 1  # and the trainer itself
    while len(alive(name)) < scattered:
        assert running.poll() is None
        time.sleep(0.02)
    running.send_signal(number)
    running.wait()
    until = time.monotonic() + 20
    while alive(name) and time.monotonic() < until:
        time.sleep(0.02)
    assert alive(name) == []


def test_so_many_run_at_once_and_no_more() -> None:
    script = "import time; print(time.time()); time.sleep(0.15); print(time.time())"
    world = World()
    agent = black_box(config(command=python(script), places=2), lambda task: world)

    async def run() -> list[Outcome]:
        answer, _ = replies()
        async with stand_in(answer) as client:
            runs = [run_episode(agent, TASK, client, "m", 60.0) for _ in range(5)]
            return await asyncio.gather(*runs)

    assert all(outcome.valid for outcome in asyncio.run(run()))
    spans = [tuple(map(float, seen.split())) for seen in world.seen]
    at_once = [sum(begin <= moment < end for begin, end in spans) for moment, _ in spans]
    assert max(at_once) == 2
