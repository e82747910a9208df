"""Plays real clients against gateways with scripted engines, one gateway for each case."""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from driving import FOUND

from experiments.client_faults import CUT, cut_once, first_call
from experiments.client_laws import Counted
from forge_jax.gateway.gateway import Gateway
from forge_jax.models.chat import Chat, built_in
from forge_jax.models.tokenizer import ByteTokenizer
from forge_jax.rollout.script import Rule, When
from forge_jax.rollout.scripted import ScriptedEngine
from forge_jax.types import Turn

SECONDS = 120  # for all cases of a client
SESSION = "played"
ANSWER = f"It holds {FOUND}."
WANTED = {"key": "café", "deep": True}
# Neither white space nor order of keys as a client would write them.
CALL = '<tool_call>\n{"name": "look", "arguments": {"deep" : true,  "key":"café"}}\n</tool_call>'
FIRST = f"Let me look it up.\n{CALL}"


def rules(first: str = FIRST, answer: str = ANSWER) -> list[Rule]:
    """The second step is taken only by a client that tells what its tool found."""
    return [Rule(when=When(contains=FOUND), text=answer), Rule(text=first, chunks=8)]


@dataclass(frozen=True)
class Case:
    """A client does the task of two steps."""

    mode: str  # of its driver
    rules: list[Rule] = field(default_factory=rules)
    fault: str = ""  # of its first call, one of FAULTS
    second: str = "continue"  # branch of the second step

    @property
    def name(self) -> str:
        return f"{self.mode} {self.fault}".strip()

    def script(self) -> list[Rule]:
        return [*first_call(self.fault, FIRST), *self.rules]


@dataclass(frozen=True)
class Played:
    """What came of a case."""

    answer: str
    looked: list[Any]  # arguments that the tool was called with
    turns: Sequence[Turn]
    drawn: Sequence[tuple[np.ndarray, list[int]]]


async def played(client: str, cases: Sequence[Case]) -> dict[str, Played]:
    """Every case of a client, by name, all played by one process of it."""
    chat = Chat(tokenizer=ByteTokenizer(), format=built_in("chatml"))
    stop = chat.stop_ids[0]
    async with AsyncExitStack() as stack:
        gateways, engines, asked = [], [], []
        for case in cases:
            engine = Counted(ScriptedEngine(case.script(), chat.tokenizer, stop))
            gateway = Gateway(engine, chat, "scripted", "admin")
            gateway.open(SESSION)
            url = await stack.enter_async_context(gateway.running())
            if case.fault == CUT:
                url = await stack.enter_async_context(cut_once(url))
            gateways.append(gateway)
            engines.append(engine)
            asked.append([case.name, case.mode, f"{url}/s/{SESSION}"])
        told = await drive(client, asked)
        return {
            case.name: Played(**told[case.name], turns=gateway.close(SESSION), drawn=engine.drawn)
            for case, gateway, engine in zip(cases, gateways, engines, strict=True)
        }


async def drive(client: str, asked: list[list[str]]) -> dict[str, Any]:
    """Runs a driver in a folder and with an environment of its own."""
    driver = Path(__file__).parent / f"drive_{client}.py"
    with tempfile.TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "ignore", str(driver), json.dumps(asked)),
            cwd=folder,
            env={
                "PATH": os.environ["PATH"],
                "HOME": folder,
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks for a list of prices
                "MSWEA_SILENT_STARTUP": "1",
            },
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(SECONDS):
                out, complaints = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 0, complaints.decode()
    return json.loads(out.decode().splitlines()[-1])
