"""The loops over real HTTP: what is rewarded, what is counted, whose fault is what."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from stand_in_server import Refusal, calls, completion, replies, says, stand_in

from forge_jax.agents import white_box
from forge_jax.agents.families import agent_of
from forge_jax.agents.protocol import Message, Tool
from forge_jax.agents.runner import run_episode
from forge_jax.agents.tasks import hop, notes
from forge_jax.agents.white_box import ToolLoop
from forge_jax.types import Outcome, Status, Task

HOP, NOTES = Task(family="hop", seed=5), Task(family="notes", seed=5)
CHAIN = hop.world_of(HOP).chain


def play(task: Task, *scripted: Mapping[str, Any]) -> tuple[Outcome, list[Mapping[str, Any]]]:
    async def run() -> tuple[Outcome, list[Mapping[str, Any]]]:
        answer, bodies = replies(*scripted)
        async with stand_in(answer) as client:
            return await run_episode(agent_of(task.family), task, client, "m", 20.0), bodies

    return asyncio.run(run())


def look_up(key: str) -> Mapping[str, Any]:
    return completion(calls("lookup", json.dumps({"key": key})), "tool_calls")


def test_lookups_then_the_digit_win() -> None:
    steps = [look_up(key) for key in CHAIN[:-1]]
    outcome, bodies = play(HOP, *steps, completion(says(f"!{CHAIN[-1]}")))
    assert (outcome.status, outcome.reward, outcome.error) == (Status.COMPLETED, 1.0, "")
    assert outcome.metrics["turns"] == len(CHAIN)
    assert outcome.metrics["tool_calls"] == len(CHAIN) - 1
    assert outcome.metrics["malformed_calls"] == 0
    assert outcome.metrics["tool_seconds"] > 0
    results = [m["content"] for m in bodies[-1]["messages"] if m["role"] == "tool"]
    assert results == list(CHAIN[1:])


@pytest.mark.parametrize("answer", [f"{CHAIN[-1]}", "!", f"!{CHAIN[-1]}.", "", f"! {CHAIN[-1]}"])
def test_only_the_exact_answer_counts(answer: str) -> None:
    outcome, _ = play(HOP, completion(says(answer)))
    assert (outcome.status, outcome.reward) == (Status.COMPLETED, 0.0)


@pytest.mark.parametrize(
    "call",
    [
        calls("search", '{"key": "a"}'),
        calls("lookup", '{"key": '),
        calls("lookup", '["a"]'),
        calls("lookup", '{"key": 3}'),
        calls("lookup", "{}"),
        calls("lookup", "", kind="custom"),
    ],
    ids=["unknown", "cut", "list", "number", "empty", "custom"],
)
def test_a_wrong_call_is_told_to_the_model_and_counted(call: Mapping[str, Any]) -> None:
    outcome, bodies = play(HOP, completion(call), completion(says(f"!{CHAIN[-1]}")))
    assert (outcome.status, outcome.reward) == (Status.COMPLETED, 1.0)
    assert outcome.metrics["malformed_calls"] == outcome.metrics["tool_calls"] == 1
    result = bodies[1]["messages"][-1]
    assert (result["role"], result["tool_call_id"]) == ("tool", "call_0")
    assert result["content"]


def test_a_key_that_is_not_there_finds_nothing() -> None:
    absent = next(k for k in "abcdef" if k not in CHAIN)
    outcome, bodies = play(HOP, look_up(absent), completion(says("!")))
    assert bodies[1]["messages"][-1]["content"] == hop.ABSENT
    assert outcome.metrics["malformed_calls"] == 0


def test_an_agent_that_never_answers_gets_nothing() -> None:
    outcome, bodies = play(HOP, *[look_up("a")] * (hop.MAX_TURNS + 1))
    assert (outcome.status, outcome.reward) == (Status.COMPLETED, 0.0)
    assert len(bodies) == outcome.metrics["turns"] == hop.MAX_TURNS


@pytest.mark.parametrize("task", [HOP, NOTES], ids=lambda task: task.family)
def test_a_reply_that_does_not_end_gets_nothing(task: Task) -> None:
    outcome, bodies = play(task, completion(says(f"!{CHAIN[-1]}"), "length"))
    assert (outcome.status, outcome.reward) == (Status.COMPLETED, 0.0)
    assert outcome.metrics["unfinished"] == len(bodies) == 1


def test_only_the_note_survives_between_windows() -> None:
    seen = notes.world_of(NOTES).seen
    written = [seen[: i + 1] for i in range(4)]  # short notes are filled up
    outcome, bodies = play(NOTES, *(completion(says(w)) for w in [*written, f"!{seen}"]))
    assert (outcome.reward, outcome.metrics["wipes"]) == (1.0, 4.0)
    prompts = [[m["content"] for m in body["messages"]] for body in bodies]
    assert prompts[2] == [f"P{seen[:2]}--,{seen[2]}"]
    assert prompts[4] == [f"T{seen}"]


def test_a_long_note_is_cut() -> None:
    _, bodies = play(NOTES, *[completion(says("1234567"))] * 4, completion(says("!")))
    assert bodies[4]["messages"] == [{"role": "user", "content": "T1234"}]


@pytest.mark.parametrize("status", [400, 429, 500])
def test_a_refused_call_is_the_agents_failure_with_its_status(status: int) -> None:
    async def refuse(path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        raise Refusal(status)

    async def run() -> Outcome:
        async with stand_in(refuse) as client:
            return await run_episode(agent_of("hop"), HOP, client, "m", 20.0)

    outcome = asyncio.run(run())
    assert outcome.status is Status.AGENT_FAILED
    assert f"HTTP {status}" in outcome.error


def test_a_server_that_does_not_answer_times_the_episode_out() -> None:
    async def hang(path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        await asyncio.sleep(0.3)
        return completion(says("!"))

    async def run() -> Outcome:
        async with stand_in(hang) as client:
            return await run_episode(agent_of("hop"), HOP, client, "m", 0.05)

    assert asyncio.run(run()).status is Status.TIMED_OUT


def test_many_at_once_keep_their_conversations_apart() -> None:
    tasks = [Task(family="hop", seed=s) for s in range(64)]

    async def follow(path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        await asyncio.sleep(0)
        last = body["messages"][-1]["content"][-1]  # "Qi" or a tool's result
        assert path == f"/s/{body['model']}/v1/chat/completions"
        return completion(says(f"!{last}")) if last.isdigit() else look_up(last)

    async def run() -> list[Outcome]:
        async with stand_in(follow) as client, asyncio.TaskGroup() as group:
            runs = []
            for task in tasks:
                url = str(client.base_url).replace("/v1", f"/s/{task.seed}/v1")
                one = client.with_options(base_url=url)
                run = run_episode(agent_of("hop"), task, one, str(task.seed), 60.0)
                runs.append(group.create_task(run))
            await asyncio.wait(runs)
        return [run.result() for run in runs]

    outcomes = asyncio.run(run())
    assert [o.reward for o in outcomes] == [1.0] * len(tasks)
    chains = [hop.world_of(task).chain for task in tasks]
    assert [o.metrics["turns"] for o in outcomes] == [len(chain) for chain in chains]


class Meeting:
    """A world whose tool answers once it was called `size` times, the last call first."""

    messages: tuple[Message, ...] = ({"role": "user", "content": "meet"},)
    tools: tuple[Tool, ...] = ()

    def __init__(self, size: int):
        self.left = size
        self.all_here = asyncio.Event()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        self.left -= 1
        if not self.left:
            self.all_here.set()
        await asyncio.wait_for(self.all_here.wait(), 5.0)
        if arguments["number"] == 9:
            raise KeyError("the world breaks")
        await asyncio.sleep(0.01 / (1 + arguments["number"]))
        return str(arguments["number"])

    async def score(self, answer: str) -> float:
        return 1.0


def meet(*numbers: int) -> tuple[Outcome, list[Mapping[str, Any]]]:
    several = calls("come", "")
    several = several | {
        "tool_calls": [
            calls("come", json.dumps({"number": number}))["tool_calls"][0]
            | {"id": f"call_{number}"}
            for number in numbers
        ]
    }

    async def run() -> tuple[Outcome, list[Mapping[str, Any]]]:
        answer, bodies = replies(completion(several, "tool_calls"), completion(says("!")))
        agent = ToolLoop(start=lambda _: Meeting(len(numbers)), max_turns=3, max_tokens=9)
        async with stand_in(answer) as client:
            return await run_episode(agent, HOP, client, "m", 20.0), bodies

    return asyncio.run(run())


def test_calls_of_one_reply_run_at_once_and_are_answered_in_order() -> None:
    outcome, bodies = meet(0, 1, 2)
    assert outcome.reward == 1.0
    results = [m for m in bodies[1]["messages"] if m["role"] == "tool"]
    assert [(m["tool_call_id"], m["content"]) for m in results] == [
        (f"call_{number}", str(number)) for number in range(3)
    ]
    # What parallel calls cost is the time in which any of them ran.
    assert 0 < outcome.metrics["tool_path_seconds"] < outcome.metrics["tool_seconds"]


def test_a_world_that_breaks_in_one_call_ends_the_others() -> None:
    outcome, _ = meet(0, 9)
    assert outcome.status is Status.ENVIRONMENT_FAILED


def test_only_what_a_server_may_have_had_is_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(white_box, "FIRST_WAIT", 0.0)
    faults = [httpx.ConnectError("refused"), httpx.ReadError("lost"), httpx.ConnectError("refused")]
    told = []

    def answer(request: httpx.Request) -> httpx.Response:
        told.append(request.headers["x-stainless-retry-count"])
        if len(told) <= len(faults):
            raise faults[len(told) - 1]
        return httpx.Response(200, json=completion(says("!")))

    async def run() -> None:
        transport = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        async with AsyncOpenAI(
            base_url="http://any", api_key="any", max_retries=0, http_client=transport
        ) as client:
            await white_box.sent(client, {"model": "m", "messages": []})

    asyncio.run(run())
    assert told == ["0", "0", "1", "1"]
