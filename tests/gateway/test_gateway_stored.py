"""Stored responses: found by their own session for as long as it holds their call."""

import pytest
from fake_engine import FakeEngine, Served, chat_of, run, served, slow, text_engine, until
from openai import BadRequestError, NotFoundError

from forge_jax.gateway.messages import encoded
from forge_jax.gateway.session import Session
from forge_jax.types import Refused

PATH = "/v1/responses"


def message_texts(items: list) -> list[str]:
    return [item.content[0].text for item in items]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chain_of_responses_is_one_conversation(stream: bool) -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "one ", "two", " three"), chat) as up:
            client, name = up.of("s"), None
            for k in range(3):
                ask = {"model": "m", "input": f"q{k}", "previous_response_id": name}
                if stream:
                    async with client.responses.stream(**ask) as events:
                        response = await events.get_final_response()
                else:
                    response = await client.responses.create(**ask)
                assert response.previous_response_id == name
                name = response.id
            turns = await up.turns("s")
            assert [t["parent"] for t in turns] == [None, 0, 1]
            read = await client.responses.retrieve(name)
            assert (read.id, read.output_text, read.usage) == (name, " three", response.usage)
            listed = await client.responses.input_items.list(name, order="asc", limit=2)
            every = [item async for item in listed]  # the client turns pages
            assert message_texts(every) == ["q0", "one ", "q1", "two", "q2"]
            assert len({item.id for item in every}) == 5
            newest = (await client.responses.input_items.list(name)).data
            assert message_texts(newest) == message_texts(every)[::-1]
            # What goes on from a deleted response has what was said before.
            await client.responses.delete(read.previous_response_id)
            with pytest.raises(NotFoundError):
                await client.responses.retrieve(read.previous_response_id)
            await client.responses.create(model="m", input="q3", previous_response_id=name)
            assert (await up.turns("s"))[3]["parent"] == 2
            # Two may go on from one.
            await client.responses.create(model="m", input="q4", previous_response_id=name)
            assert (await up.turns("s"))[4]["parent"] == 2

    run(test)


def test_instructions_are_those_of_the_request() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        engine = text_engine(chat, "ok")
        async with served(engine, chat) as up:
            create = up.of("s").responses.create
            first = await create(model="m", input="x", instructions="Rule A")
            await create(model="m", input="y", instructions="B", previous_response_id=first.id)
            assert "Rule A" not in engine.requests[1].facts.text
            assert engine.requests[1].facts.text.index("B") < engine.requests[1].facts.text.index(
                "x"
            )

    run(test)


async def refused(up: Served, status: int, session: str = "s", **fields) -> dict:
    answer = await up.post(f"/s/{session}{PATH}", {"model": "m", **fields})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_only_what_a_session_stores_is_found() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "ok"), chat) as up:
            kept = await up.of("s").responses.create(model="m", input="x")
            loose = await up.of("s").responses.create(model="m", input="x", store=False)
            for session, response in (("t", kept), ("s", loose)):
                error = await refused(up, 404, session, input="y", previous_response_id=response.id)
                assert error["param"] == "previous_response_id"
                assert error["code"] == "previous_response_not_found"
                reference = {"type": "item_reference", "id": response.output[0].id}
                error = await refused(up, 404, session, input=[reference])
                assert (error["param"], error["type"]) == ("input[0]", "not_found_error")
                for method, end in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
                    path = f"/s/{session}{PATH}/{response.id}{end}"
                    answer = await up.http.request(method, path)
                    assert answer.status_code == 404
                    assert answer.json()["error"]["code"] == "response_not_found"
            # A key names a session as a path does; without either nothing is ever found.
            anonymous = await up.post(PATH, {"model": "m", "input": "x"})
            assert (await up.http.get(f"{PATH}/{anonymous.json()['id']}")).status_code == 404
            assert (await up.http.get(f"{PATH}/{kept.id}")).status_code == 404
            keyed = await up.client.responses.create(model="m", input="x")
            assert (await up.client.responses.retrieve(keyed.id)).id == keyed.id
            up.gateway.open("s")
            with pytest.raises(NotFoundError):
                await up.of("s").responses.retrieve(kept.id)

    run(test)


def test_the_oldest_are_forgotten_with_their_calls() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "ok"), chat, keep_tokens=2000) as up:
            create = up.of("s").responses.create
            names = [(await create(model="m", input=f"q{k}")).id for k in range(9)]
            found = [(await up.http.get(f"/s/s{PATH}/{name}")).status_code == 200 for name in names]
            assert found == sorted(found)
            assert not found[0]
            assert found[-1]
            # What never becomes a token counts too.
            await create(model="m", input="x", metadata={"long": "x" * 9000})
            assert (await up.http.get(f"/s/s{PATH}/{names[-1]}")).status_code == 404

    run(test)


def held(session: Session) -> int:
    """Bytes of all items that live responses of a session reach, each once."""
    reached = {}
    for stored in session.stored._responses.values():
        for item in (*stored.given.before(), *stored.given.items, *stored.answer["output"]):
            reached[id(item)] = item
    return sum(len(encoded(item)) for item in reached.values())


@pytest.mark.parametrize("way", ["previous_response_id", "item_reference"])
def test_what_a_response_keeps_alive_counts_for_it(way: str) -> None:
    """Though its own body is a few bytes long, and the calls before it are forgotten."""

    async def test() -> None:
        chat, keep, most = chat_of("chatml"), 12000, 0
        silent = {"type": "reasoning", "summary": [], "encrypted_content": "x" * 3000}
        async with served(text_engine(chat, "ok"), chat, keep_tokens=keep) as up:
            fields: dict = {}
            for k in range(60):
                ask = {"role": "user", "content": f"{k}"}  # else nothing of it becomes a token
                said = [*fields.pop("refs", []), silent, ask]
                answer = await up.of("s").responses.create(model="m", input=said, **fields)
                session = up.gateway._sessions.get("s")
                if session is None:  # the talk has outgrown the bound, and is forgotten whole
                    fields = {}
                    continue
                most = max(most, held(session))
                assert held(session) <= 4 * keep
                if way == "previous_response_id":
                    fields = {"previous_response_id": answer.id}
                else:
                    listed = await up.of("s").responses.input_items.list(answer.id, order="asc")
                    names = [item.id async for item in listed] + [answer.output[0].id]
                    fields = {"refs": [{"type": "item_reference", "id": n} for n in names]}
            assert most > 2 * keep

    run(test)


MISTAKES = [
    ({}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{}]}, "input[0].type"),
    ({"input": [{"content": "x"}]}, "input[0].type"),
    ({"input": [{"type": "message", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].type",
    ),
    ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
    ({"input": "x", "instructions": 5}, "instructions"),
    ({"input": "x", "conversation": "c"}, "conversation"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "x", "temperature": "hot"}, "temperature"),
    ({"input": "x", "tools": [5]}, "tools[0]"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
    ({"input": "x", "tool_choice": "required"}, "tool_choice"),
    ({"input": "x", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
    ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    (
        {"input": "x", "guided_regex": "a", "text": {"format": {"type": "json_object"}}},
        "text.format",
    ),
    ({"input": "x", "store": 1}, "store"),
    ({"input": "x", "metadata": []}, "metadata"),
]


def test_mistakes_are_named() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "ok"), chat) as up:
            for fields, param in MISTAKES:
                error = await refused(up, 400, **fields)
                assert (error["param"], error["type"]) == (param, "invalid_request_error")
            kept = await up.of("s").responses.create(model="m", input="x")
            for query in ("limit=0", "limit=x", f"limit={'9' * 5000}", "order=odd", "stream=true"):
                end = "" if "stream" in query else "/input_items"
                answer = await up.http.get(f"/s/s{PATH}/{kept.id}{end}?{query}")
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == query.partition("=")[0]
            twice = [{"type": "item_reference", "id": kept.output[0].id}] * 2
            assert (await refused(up, 400, input=twice))["param"] == "input"

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_what_an_engine_refuses_has_its_status(stream: bool) -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        refusal = Refused(400, "too long", code="context_length_exceeded")
        async with served(FakeEngine(lambda _: refusal), chat) as up:
            with pytest.raises(BadRequestError) as raised:
                await up.of("s").responses.create(model="m", input="x", stream=stream)
            assert raised.value.code == "context_length_exceeded"

    run(test)


@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_that_fails_ends_with_the_reason(begun: bool) -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(slow(pause=0.2), chat, keep_alive_seconds=0.02) as up:
            up.gateway.open("s")
            stream = await up.of("s").responses.create(model="m", input="x", stream=True)
            if not begun:  # but for a comment that keeps it alive
                up.gateway.close("s")
            events = []
            async for event in stream:
                events.append(event)
                if event.type == "response.output_text.delta":
                    up.gateway.close("s")
            kinds = [event.type for event in events]
            assert ("response.output_text.delta" in kinds) == begun
            assert kinds[:2] == ["response.created", "response.in_progress"]
            assert kinds[-2:] == ["error", "response.failed"]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert events[-1].response.status == "failed"
            assert "closed" in events[-1].response.error.message

    run(test)


def test_a_response_nobody_received_is_not_stored() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        engine = slow()
        async with served(engine, chat) as up:
            async with up.http.stream(
                "POST", f"/s/s{PATH}", json={"model": "m", "input": "x", "stream": True}
            ) as answer:
                lines = answer.aiter_lines()
                first = ""
                while not first.startswith("data:"):
                    first = await anext(lines)
            await until(lambda: engine.aborted == 1)
            name = first.partition('"id":"')[2].partition('"')[0]
            assert name.startswith("resp_")
            assert (await up.http.get(f"/s/s{PATH}/{name}")).status_code == 404
            await until(lambda: engine.running == 0)
            (turn,) = await up.turns("s")
            assert turn["finish_reason"] == "abort"

    run(test)


def test_ids_of_a_forgotten_session_name_nothing_of_its_successor() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat, keep_tokens=1000) as up:
            first = await up.of("s").responses.create(model="m", input="a")
            for i in range(4):
                await up.of(f"other{i}").responses.create(model="m", input="b")
            second = await up.of("s").responses.create(model="m", input="c")
            assert len(await up.turns("s")) == 1
            assert second.id != first.id
            with pytest.raises(NotFoundError):
                await up.of("s").responses.create(
                    model="m", input="d", previous_response_id=first.id
                )

    run(test)
