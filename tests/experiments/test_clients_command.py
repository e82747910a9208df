"""The command that plays published agents: what it tells of one that works and one that fails."""

import asyncio
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from experiments import clients
from experiments.clients import CLIENTS, Config, main, merged
from experiments.command import CONFIGS
from forge_jax.config import ProgramConfig, load

NAME = "pydantic-ai"  # quick to start, and installed beside the tests
Play = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Play:
    """Plays the client that the tests themselves have, as if the command had installed it."""
    pytest.importorskip("pydantic_ai", reason="the extra clients is not installed")
    folder = tmp_path_factory.mktemp("clients")
    python = folder / NAME / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -W ignore "$@"\n')
    python.chmod(0o755)
    (folder / NAME / "version").write_text("2.0\n")

    def play(**changes: Any) -> dict[str, Any]:
        client = dataclasses.replace(CLIENTS[NAME], **changes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clients, "CLIENTS", {NAME: client})
            return asyncio.run(clients.play(NAME, Config(names=(NAME,), install=str(folder))))

    return play


def test_a_client_that_does_its_task(play: Play) -> None:
    row = play()
    assert (row["client"], row["version"], row["done"], row["error"]) == (NAME, "2.0", True, "")
    assert (row["samples"], row["branches"], row["broken"]) == (2, ("root", "continue"), [])
    assert row["sampled"] == row["trained"] > 0


def test_a_client_that_does_not(play: Play) -> None:
    row = play(first="I guess: a pearl.")
    assert not row["done"]
    assert row["error"] == "the answer is not what the drawer holds"
    assert (row["calls"], row["broken"]) == (1, [])


def test_every_client_has_a_configuration() -> None:
    folder = Path(CONFIGS) / "agent"
    ours = {"base", "head_tail", "lookup"}  # which nobody publishes
    assert {file.stem for file in folder.glob("*.yaml")} - ours == set(CLIENTS)
    for name in CLIENTS:
        load(ProgramConfig, merged(folder / f"{name}.yaml"))


def test_mistakes_are_named() -> None:
    assert "names='cody' is none of codex, " in refused(main, "names=[cody]")
    assert "fault='gone' must be one of " in refused(main, "fault=gone")
    assert "seconds=0.0 must be > 0" in refused(main, "seconds=0")
