"""The OpenAPI document tells the truth: of the routes, and of what requests drawn from it get."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
import requests
import schemathesis
from fake_engine import ADMIN, FakeEngine, chat_of
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from starlette.routing import Route

from forge_jax.gateway.gateway import Gateway
from forge_jax.gateway.openapi import document

SCHEMA = schemathesis.openapi.from_dict(dict(document()))
OPERATIONS = [
    (path, method) for path, told in document()["paths"].items() for method in told
]  # fmt: skip
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
USER = [{"role": "user", "content": "hi"}]
ANSWERED = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": USER},
    "/v1/responses": {"input": "hi"},
}
REPLY = [*b'<tool_call>{"name": "f", "arguments": {}}</tool_call>x', 258]


@pytest.fixture(scope="module")
def up() -> Iterator[tuple[Gateway, str]]:
    """A gateway that runs in a thread, and its URL."""
    gateway = Gateway(FakeEngine(lambda _: REPLY, chunk=99), chat_of("chatml"), "tiny", ADMIN)
    started, urls, loop = threading.Event(), [], asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with gateway.running() as url:
            urls.append(url)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    started.wait(30)
    yield gateway, urls[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def test_every_route_is_told_and_no_other(up: tuple[Gateway, str]) -> None:
    served = [
        (route.path.replace(":path", ""), method.lower())
        for route in up[0].app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    ]
    assert sorted(served) == sorted(OPERATIONS)
    told = requests.get(f"{up[1]}/openapi.json", timeout=30).json()
    assert told["paths"].keys() == document()["paths"].keys()


@pytest.mark.parametrize(
    ("path", "method", "mode"),
    [
        (path, method, mode)
        for path, method in OPERATIONS
        for mode in GenerationMode
        # There is little that a read could have wrong.
        if mode is GenerationMode.POSITIVE or method == "post"
    ],
)
def test_what_is_drawn_from_it_is_answered_as_it_says(
    path: str, method: str, mode: GenerationMode, up: tuple[Gateway, str]
) -> None:
    _, url = up
    refusing = [checks.negative_data_rejection] if mode is GenerationMode.NEGATIVE else []
    sent = []

    @given(case=SCHEMA[path][method].as_strategy(generation_mode=mode))
    @settings(
        max_examples=12,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(case: schemathesis.Case) -> None:
        answer = case.call(base_url=url, headers={"authorization": f"Bearer {ADMIN}"}, timeout=30)
        # 413 refuses, too: a body of too many messages can be too large before they are counted.
        rest = refusing if answer.status_code != 413 else []
        case.validate_response(answer, checks=[*CHECKS, *rest])
        sent.append(answer.status_code)

    run()
    assert sent
    # Every call that began has ended.
    assert "forge_calls_running 0" in requests.get(f"{url}/metrics", timeout=30).text


@pytest.mark.parametrize("path", ANSWERED)
def test_an_answer_has_the_shape_that_is_told(path: str, up: tuple[Gateway, str]) -> None:
    case = SCHEMA[path]["post"].Case(body=ANSWERED[path], media_type="application/json")
    answer = case.call(base_url=up[1], timeout=30)
    assert answer.status_code == 200
    case.validate_response(answer, checks=CHECKS)
