"""What sessions keep: calls that ended hold their record alone, calls that never began nothing."""

import gc
import tracemalloc

from fake_engine import LOOK, FakeEngine, chat_of, run, served, text_engine

from forge_jax.config import BudgetConfig

PATH = "/v1/chat/completions"


def held() -> int:
    """Bytes of all Python objects now."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def test_a_call_that_ended_keeps_its_tokens_and_not_how_they_came() -> None:
    async def test() -> None:
        chat, tokens = chat_of("chatml"), 5000
        engine = FakeEngine(lambda _: [*b"x" * tokens, 258], chunk=1)
        tool = {**LOOK, "function": {**LOOK["function"], "description": "y" * 100_000}}
        asked = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
        async with served(engine, chat) as up:
            up.gateway.open("s")
            await up.post(f"/s/s{PATH}", asked)
            engine.requests.clear()
            tracemalloc.start()
            try:
                before = held()
                await up.post(f"/s/s{PATH}", asked)
                engine.requests.clear()
                grown = held() - before
            finally:
                tracemalloc.stop()
            last = up.gateway.close("s")[-1]
            assert len(last.output) == tokens + 1
            # Ids, log-probs and versions, four bytes each; reply and newest prompt as text.
            record = 4 * (len(last.prompt) + 3 * tokens)
            assert grown < record + tokens + len(last.prompt) + 50_000

    run(test)


def test_prompts_of_calls_that_never_began_are_forgotten() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat) as up:
            up.gateway.open("s", budget=BudgetConfig(requests=1))
            grown = 0
            for i in range(25):
                said = {"messages": [{"role": "user", "content": f"{i} " + "y" * 20_000}]}
                answer = await up.post(f"/s/s{PATH}", said)
                assert answer.status_code == (429 if i else 200)
                if i == 4:
                    tracemalloc.start()
                    before = held()
            try:
                grown = held() - before
            finally:
                tracemalloc.stop()
            assert grown < 5 * 4 * 20_000  # of twenty

    run(test)


def test_what_clients_say_of_their_sessions_counts_for_what_is_kept() -> None:
    async def test() -> None:
        chat = chat_of("chatml")
        async with served(text_engine(chat, "x"), chat, keep_tokens=20_000) as up:
            body = {"messages": [{"role": "user", "content": "hi"}]}
            for _ in range(8):
                await up.post(f"/s/s{PATH}", body, **{"x-codex-turn-metadata": "y" * 30_000})
            assert len(await up.turns("s")) == 2

    run(test)
