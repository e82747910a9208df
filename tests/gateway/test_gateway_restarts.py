"""A server that is lost serves again at its address; what it knew and what runs is kept."""

import asyncio

import httpx
import pytest
from fake_engine import chat_of, run, slow, text_engine, until

from forge_jax import restarts
from forge_jax.config import UserError
from forge_jax.gateway import server
from forge_jax.gateway.gateway import Gateway
from forge_jax.gateway.server import NAME, serving
from forge_jax.restarts import STEADY_SECONDS, TRIES, Faults

PATH = "/s/s/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(server, "LOOK_SECONDS", 0.01)


def end_task() -> None:
    for task in asyncio.all_tasks():
        if task.get_name() == NAME:
            task.cancel()


@pytest.fixture
def serving_parts(monkeypatch: pytest.MonkeyPatch) -> list[server._Serving]:
    """What `serving` made, to be broken."""
    made: list[server._Serving] = []
    real = server._Serving.start

    async def start(self: server._Serving, port: int) -> None:
        made.append(self)
        await real(self, port)

    monkeypatch.setattr(server._Serving, "start", start)
    return made


@pytest.mark.parametrize("how", ["task", "closed", "shut", "stops"])
def test_a_lost_server_serves_again_and_its_calls_go_on(
    how: str, serving_parts: list[server._Serving]
) -> None:
    def lose() -> None:
        parts = serving_parts[-1]
        assert parts._server is not None
        match how:
            case "task":
                end_task()
            case "closed":  # behind asyncio's back
                parts._listener.close()
            case "shut":
                parts._server.servers[0].close()
            case "stops":
                parts._server.should_exit = True

    async def test() -> None:
        engine = slow(pause=0.02, tokens=8)
        gateway = Gateway(engine, chat_of("chatml"), "m", "key")
        gateway.open("s", seed=3)
        async with gateway.running() as url, httpx.AsyncClient(base_url=url) as http:
            call = asyncio.create_task(http.post(PATH, json=BODY))
            await until(lambda: engine.running == 1)
            lose()
            await until(lambda: gateway.restarts == 1)
            async with httpx.AsyncClient(base_url=url) as other:  # a connection of its own
                await until(lambda: len(serving_parts) == 2)
                assert (await other.post(PATH, json=BODY)).status_code == 200
            assert (await call).status_code == 200
            turns = gateway.close("s")
            assert [str(turn.finish) for turn in turns] == ["stop", "stop"]
            assert gateway.restarts == 1
        assert engine.running == 0

    run(test)


def test_a_server_that_goes_on_failing_ends_the_block_with_its_fault() -> None:
    async def test() -> None:
        async def app(scope: object, receive: object, send: object) -> None: ...

        seen: list[None] = []

        async def served() -> None:
            async with serving(app, "127.0.0.1", 0, 0.1, lambda: seen.append(None)):
                while True:
                    end_task()
                    await asyncio.sleep(0.005)

        with pytest.raises(RuntimeError, match="its task has ended"):
            await served()
        assert len(seen) == TRIES - 1
        current = asyncio.current_task()
        assert current is not None
        assert not current.cancelling()

    run(test)


def test_a_port_that_another_has_taken_is_a_fault_and_no_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        async def app(scope: object, receive: object, send: object) -> None: ...

        def taken(host: str, port: int) -> None:
            raise UserError(f"host={host} port={port}: Address already in use")

        async def served() -> None:
            async with serving(app, "127.0.0.1", 0, 0.1, lambda: None):
                monkeypatch.setattr(server, "_listening", taken)
                end_task()
                await asyncio.sleep(30)

        with pytest.raises(RuntimeError, match=r"come up again: .* Address already in use") as seen:
            await served()
        assert not isinstance(seen.value, UserError)

    run(test)


def test_who_leaves_while_it_is_away_is_not_held_up() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        gateway = Gateway(text_engine(chat, "x"), chat, "m", "key")
        async with gateway.running():
            end_task()
            await until(lambda: gateway.restarts == 1)

    run(test)


@pytest.mark.parametrize("served", [0.0, STEADY_SECONDS + 1])
def test_faults_in_a_row_double_the_wait_and_come_to_an_end(served: float) -> None:
    waits = [Faults.wait(faults, served) for faults in [Faults()] for _ in range(TRIES)]
    first = restarts.FIRST_WAIT
    rising = [first * 2**n for n in range(TRIES - 1)]
    assert waits == ([*rising, None] if not served else [first] * TRIES)
