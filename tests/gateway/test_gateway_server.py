"""The server: streams kept alive, calls drained, models and metrics told."""

import asyncio
import json
import signal
import socket

import httpx
import pytest
from fake_engine import FakeEngine, chat_of, run, served, text_engine, until

from forge_jax.config import UserError
from forge_jax.gateway.config import GatewayConfig
from forge_jax.gateway.gateway import Gateway
from forge_jax.gateway.server import _listening

USER = [{"role": "user", "content": "hi"}]
PATH = "/v1/chat/completions"


def test_a_quiet_stream_is_kept_alive() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        engine = FakeEngine(lambda _: [*b"ab", 258], chunk=1, pause=0.3)
        async with served(engine, chat, keep_alive_seconds=0.05) as up:
            answer = await up.post(PATH, {"messages": USER, "stream": True})
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in answer.text.split("\n\n") if line]
            assert lines[0] == ": keep-alive"
            assert lines.count(": keep-alive") >= 6
            assert lines[-1] == "data: [DONE]"
            stream = await up.client.chat.completions.create(model="m", messages=USER, stream=True)
            text = "".join([c.choices[0].delta.content or "" async for c in stream])
            assert text == "ab"

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_running_calls_end_before_the_server_does(stream: bool) -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        engine = FakeEngine(lambda _: [*b"abc", 258], chunk=1, pause=0.1)
        gateway = Gateway(engine, chat, "m", "key")
        async with httpx.AsyncClient() as http:
            async with gateway.running() as url:
                body = {"messages": USER, "stream": stream}
                call = asyncio.create_task(http.post(url + PATH, json=body))
                await until(lambda: engine.running == 1)
            answer = await call
            assert answer.status_code == 200
            assert answer.text.endswith("[DONE]\n\n") if stream else "abc" in answer.text
            with pytest.raises(httpx.ConnectError):
                await http.post(url + PATH, json=body)

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_does_not_wait_for_ever(stream: bool) -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        engine = FakeEngine(lambda _: [*b"abc", 258], chunk=1, pause=0.1)
        gateway = Gateway(engine, chat, "m", "key", GatewayConfig(drain_seconds=0.2))
        gateway.open("s")
        body = {"messages": USER, "stream": stream}
        async with httpx.AsyncClient() as http:
            async with gateway.running() as url:
                call = asyncio.create_task(http.post(f"{url}/s/s{PATH}", json=body))
                await until(lambda: engine.running == 1)
                await asyncio.sleep(0.15)  # a token has come
                engine.pause = 30
            assert engine.running == 0
            (turn,) = gateway.close("s")
            assert turn.finish == "abort"
            # Its client hears why: by a status, or within the stream that had begun.
            answer = await call
            assert answer.status_code == (200 if stream else 503)
            assert '"message":"the server stops"' in answer.text
            assert answer.text.endswith("[DONE]\n\n") == stream

    run(test)


def test_a_client_that_reads_nothing_does_not_hold_the_server() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        engine = FakeEngine(lambda _: [97] * 1_000_000, chunk=20_000)
        gateway = Gateway(engine, chat, "m", "key", GatewayConfig(drain_seconds=0.2))
        body = json.dumps({"messages": USER, "stream": True, "return_token_ids": True})
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        async with gateway.running() as url:
            port = int(url.rpartition(":")[2])
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write((head + body).encode())
            await until(lambda: engine.running == 1)
            await asyncio.sleep(2)  # the answer has filled what lies between the two
        assert engine.running == 0
        writer.close()

    run(test)


def test_signals_stay_with_the_process() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
        async with served(text_engine(chat, "x"), chat):
            assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == before
        assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == before

    run(test)


def test_an_address_that_cannot_be_had() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        gateway = Gateway(text_engine(chat, "x"), chat, "m", "key")
        async with gateway.running() as url:
            port = int(url.rpartition(":")[2])
            for host, number in (("127.0.0.1", port), ("999.0.0.1", 0)):
                with pytest.raises(UserError, match=f"host={host} port={number}"):
                    async with gateway.running(host, number):
                        pass

    run(test)


def test_small_answers_are_not_held_back() -> None:
    """asyncio must see that the socket is TCP, or each answer waits for an acknowledgement."""

    async def test() -> None:
        seen: list[int] = []

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            own = writer.get_extra_info("socket")
            seen.append(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = _listening("127.0.0.1", 0)
        async with await asyncio.start_server(connected, sock=listener):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            await reader.read()
            writer.close()
            await writer.wait_closed()
        assert seen == [1]

    run(test)


def test_models_health_and_metrics() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat) as up:
            assert [m.id async for m in up.of("s").models.list()] == ["tiny"]
            assert (await up.client.models.retrieve("tiny")).object == "model"
            assert (await up.http.get("/health")).json() == {"status": "ok"}
            talk = [*USER, {"role": "assistant", "content": "x"}, *USER]
            other = [*USER, {"role": "assistant", "content": "y"}, *USER]
            for messages in (USER, talk, other):
                await up.post(f"/s/s{PATH}", {"messages": messages})
            text = (await up.http.get("/metrics")).text
            lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
            assert lines["forge_calls_total"] == "3"
            assert lines["forge_calls_running"] == "0"
            assert lines["forge_sessions"] == "1"
            assert lines['forge_completions_total{finish="stop"}'] == "3"
            assert lines["forge_sampled_tokens_total"] == "6"
            assert lines["forge_cached_tokens_total"] == "3"
            assert lines['forge_replies_total{rule="content"}'] == "1"
            assert lines['forge_replies_total{rule="foreign"}'] == "1"
            assert lines['forge_branches_total{branch="root"}'] == "1"
            assert lines['forge_branches_total{branch="continue"}'] == "1"
            assert lines['forge_branches_total{branch="history_edited"}'] == "1"
            assert lines["forge_spliced_tokens_total"] == "2"

    run(test)
