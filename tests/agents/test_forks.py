"""Forked episodes are like fresh ones: apart, held to limits, and gone at the end."""

import asyncio
import json
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from black_box_play import TASK, World, config
from openai import AsyncOpenAI
from stand_in_server import replies, stand_in
from test_process import alive

from forge_jax.agents.black_box import BlackBox, black_box, gateway_of
from forge_jax.agents.runner import run_episode
from forge_jax.config import UserError
from forge_jax.types import Outcome, Status

KINDS = pytest.mark.parametrize("kind", ["none", "auto"])


def episodes(function: str, worlds: Sequence[World], **settings: object) -> list[Outcome]:
    """One episode in each world, all at once, of one agent."""
    forked = {"function": f"black_box_functions:{function}", "begin": "forked", "stdin": ""}
    cfg = config(**{**forked, **settings})

    async def run() -> list[Outcome]:
        answer, _ = replies()
        async with stand_in(answer) as client:
            agents = iter(worlds)
            agent = black_box(cfg, lambda task: next(agents))
            runs = [run_episode(agent, TASK, client, "m", 60.0) for _ in worlds]
            return list(await asyncio.gather(*runs))

    return asyncio.run(run())


def seconds() -> str:
    """A time to sleep that no other process has."""
    return f"600.{random.randrange(10**9)}"


@KINDS
def test_every_episode_is_a_process_of_its_own_from_one_import(kind: str) -> None:
    worlds = [World() for _ in range(4)]
    outcomes = episodes("remember", worlds, sandbox={"kind": kind}, env={"OWN": "{model}"})
    assert [outcome.error for outcome in outcomes] == [""] * 4
    told = [json.loads(world.seen[0]) for world in worlds]
    assert len({one["imported"] for one in told}) == 1
    assert len({one["pid"] for one in told} | {told[0]["imported"]}) == 5
    assert {one["calls"] for one in told} == {1}
    assert len({one["random"] for one in told}) == 4
    assert [one["folder"] for one in told] == [["given"]] * 4
    assert len({one["environment"]["HOME"] for one in told}) == 4
    assert {one["environment"]["OWN"] for one in told} == {"m"}
    assert not {"PYTHONPATH"} & set(told[0]["environment"])
    # Its three standard ones, a copy of stdout, and the listing; none of who forked it.
    assert {one["handles"] for one in told} == {5}


@KINDS
def test_a_fork_that_will_not_end_is_killed_with_all_it_started(kind: str) -> None:
    name = seconds()
    limits = {"seconds": 0.7, "grace": 0.1}
    (outcome,) = episodes("scatter", [World(name)], sandbox={"kind": kind}, limits=limits)
    assert (outcome.status, outcome.error) == (Status.TIMED_OUT, "no end after 0.7 s")
    assert alive(name) == []


def test_what_a_fork_left_running_dies_with_it_while_others_go_on() -> None:
    name = seconds()
    worlds = [World(name), World(name)]
    assert all(outcome.valid for outcome in episodes("stray", worlds))
    assert alive(name) == []


def test_a_function_that_fails_says_why_and_others_go_on() -> None:
    failed = episodes("fails", [World("luck"), World("fun")])
    assert [outcome.status for outcome in failed] == [Status.AGENT_FAILED] * 2
    assert [outcome.error.splitlines()[-1] for outcome in failed] == [
        "RuntimeError: no luck",
        "RuntimeError: no fun",
    ]
    (killed,) = episodes("broken", [World()])
    assert killed.error.startswith("killed by SIGKILL")


def test_a_function_that_cannot_be_imported_is_told() -> None:
    (outcome,) = episodes("nowhere", [World()])
    assert outcome.status is Status.AGENT_FAILED
    assert "has no attribute 'nowhere'" in outcome.error.splitlines()[0]


async def begun(agent: BlackBox, client: AsyncOpenAI) -> tuple[asyncio.Task[Outcome], Path]:
    """An episode of an agent that waits, and the folder of what it was forked from."""
    running = asyncio.create_task(run_episode(agent, TASK, client, "m", 60.0))
    folder = agent.processes.folder(gateway_of(str(client.base_url)))
    assert folder is not None
    async with asyncio.timeout(60):
        while not list(folder.glob("*/work/began")):
            await asyncio.sleep(0.02)
    return running, folder


def waiting(kind: str) -> BlackBox:
    forked = {"function": "black_box_functions:waits", "begin": "forked", "stdin": ""}
    return black_box(config(**forked, sandbox={"kind": kind}), lambda task: World())


@KINDS
def test_an_interrupt_leaves_nothing(kind: str) -> None:
    """Neither of episodes that run, nor of what they are forked from, nor a folder."""

    async def run() -> Path:
        answer, _ = replies()
        async with stand_in(answer) as client:
            running, folder = await begun(waiting(kind), client)
            assert alive(str(folder))
            running.cancel()
            return folder

    folder = asyncio.run(run())
    assert alive(str(folder)) == []
    assert not folder.exists()


def test_a_nursery_that_dies_is_the_worlds_fault_and_there_is_another() -> None:
    async def run() -> None:
        answer, _ = replies()
        async with stand_in(answer) as client:
            agent = waiting("none")
            running, folder = await begun(agent, client)
            for line in Path("/proc").glob("[0-9]*/cmdline"):
                if f"{folder}/socket".encode() in line.read_bytes():
                    os.kill(int(line.parent.name), signal.SIGKILL)
            outcome = await running
            assert outcome.status is Status.ENVIRONMENT_FAILED, outcome
            async with asyncio.timeout(60):
                while agent.processes.folder(gateway_of(str(client.base_url))) == folder:
                    await asyncio.sleep(0.02)
            again, _ = await begun(agent, client)
            again.cancel()

    asyncio.run(run())


def test_a_command_is_not_forked() -> None:
    with pytest.raises(UserError, match="begin=forked goes with a function"):
        config(command=["true"], begin="forked")
    with pytest.raises(UserError, match="begin='warm'"):
        config(function="a:b", begin="warm", stdin="")
