"""The tree of a session, through HTTP: reasons of branches, rules of replies, tokens that drift."""

import asyncio

from fake_engine import LOOK, FakeEngine, Served, chat_of, run, served, slow, text_engine, until
from pair_tokenizer import PairTokenizer
from test_gateway_history import chat
from test_gateway_parents import StopEngine

from forge_jax.gateway.session import stable_seed
from forge_jax.models.chat import Chat, built_in
from forge_jax.types import Refused

USER = {"role": "user", "content": "hi"}
PATH = "/s/s/v1/chat/completions"
CALL = '<tool_call>{"name": "look", "arguments": {"key": "k"}}</tool_call>'


async def ask(up: Served, *messages: dict, **fields: object) -> dict:
    """Asks in session s; gives the message of the answer."""
    answer = await up.post(PATH, {"messages": list(messages), **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


async def branches(up: Served) -> list[str]:
    return [turn["branch"] for turn in await up.turns("s")]


async def rules(up: Served) -> list[tuple[str, int | None]]:
    """Rule and turn of every assistant message of the newest call."""
    return [(reply["rule"], reply["turn"]) for reply in (await up.turns("s"))[-1]["replies"]]


def test_every_call_has_the_reason_it_begins_where_it_does() -> None:
    async def test() -> None:
        form = chat_of("chatml")
        async with served(text_engine(form, "one"), form) as up:
            first = await ask(up, USER, tools=[LOOK])
            await ask(up, USER, first, USER, tools=[LOOK], n=2)
            # A second talk that goes on from the first answer is not the one that went on.
            await ask(up, USER, first, USER | {"content": "else"}, tools=[LOOK])
            await ask(up, USER, first, USER)
            await ask(up, USER, tools=[LOOK])
            await ask(up, USER, tools=[LOOK], temperature=0.5)
            await ask(up, USER, {"role": "assistant", "content": "two"}, USER, tools=[LOOK])
            await ask(up, {"role": "system", "content": "Title?"}, USER | {"content": "Task: hi"})
            marked = {"x-stainless-retry-count": "1"}
            await up.post(PATH, {"messages": [USER], "tools": [LOOK]}, **marked)
            assert await branches(up) == [
                "root", "continue", "parallel", "history_edited", "tools_changed", "repeated",
                "repeated", "history_edited", "side_call", "resent",
            ]  # fmt: skip
            text = (await up.http.get("/metrics")).text
            assert 'forge_branches_total{branch="history_edited"} 2' in text

    run(test)


def test_an_attempt_that_was_refused_leaves_no_branch() -> None:
    async def test() -> None:
        form = chat_of("chatml")
        engine = text_engine(form, "one")
        reply, engine.reply = engine.reply, lambda _: Refused(429, "full")
        async with served(engine, form) as up:
            up.gateway.open("s", seed=1)
            assert (await up.post(PATH, {"messages": [USER]})).status_code == 429
            engine.reply = reply
            first = await ask(up, USER)
            engine.reply = lambda _: Refused(503, "down")
            told = {"messages": [USER, first, USER]}
            assert (await up.post(PATH, told)).status_code == 503
            engine.reply = reply
            await ask(up, *told["messages"])
            assert await branches(up) == ["root", "continue"]
            seeds = [request.sampling.seed for request in engine.requests]
            assert seeds == [stable_seed(1, k) for k in (0, 0, 1, 1)]

    run(test)


def test_a_branch_that_was_given_up_leaves_its_parent_continued() -> None:
    async def test() -> None:
        form = chat_of("chatml")
        engine = text_engine(form, "one")
        async with served(engine, form) as up:
            first = await ask(up, USER)
            await ask(up, USER, first, USER | {"content": "go on"})
            engine.pause = 10
            body = {"messages": [USER, first, USER | {"content": "given up"}]}
            gone = asyncio.create_task(up.post(PATH, body))
            await until(lambda: engine.running == 1)
            gone.cancel()
            await until(lambda: engine.running == 0)
            engine.pause = 0
            await ask(up, USER, first, USER | {"content": "something else"})
            assert (await branches(up))[::3] == ["root", "history_edited"]

    run(test)


def test_prompts_of_text_continue_or_are_unknown() -> None:
    async def test() -> None:
        form = chat_of("chatml")
        async with served(text_engine(form, "one"), form) as up:
            for prompt in ("a", "aone<|im_end|>b", "c"):
                await up.post("/s/s/v1/completions", {"prompt": prompt})
            assert await branches(up) == ["root", "continue", "unknown"]

    run(test)


def test_siblings_that_run_at_once_are_parallel_and_their_continuations_too() -> None:
    async def test() -> None:
        engine = slow(pause=0.01, tokens=20)
        async with served(engine, chat_of("chatml")) as up:
            told = [USER, {"role": "assistant", "content": "x"}, USER]
            await ask(up, USER, max_tokens=1)
            for seeds in ((None, None), (1, 2)):
                before = len(engine.requests)
                both = [asyncio.create_task(ask(up, *told, seed=seed)) for seed in seeds]
                await until(lambda before=before: len(engine.requests) == before + 2)
                await asyncio.gather(*both)
            assert await branches(up) == ["root", "continue", "parallel", "repeated", "parallel"]

    run(test)


def test_the_rule_that_knew_a_reply_is_recorded() -> None:
    async def test() -> None:
        form = chat_of("chatml")
        async with served(text_engine(form, f"I look. {CALL}", "Done."), form) as up:
            reply = await ask(up, USER, tools=[LOOK])
            result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "1"}
            done = await ask(up, USER, reply, result, tools=[LOOK])
            assert await rules(up) == [("call_id", 0)]
            dropped = reply | {"content": None}
            await ask(up, USER, dropped, result, done, USER, tools=[LOOK])
            assert await rules(up) == [("text_dropped", 0), ("content", 1)]
            other = reply | {"content": "I never said so."}
            await ask(up, USER, other, result, done, tools=[LOOK])
            assert await rules(up) == [("foreign", None), ("content", 2)]  # the newest of two
            item = (await up.of("s").responses.create(model="m", input="x")).output[0].to_dict()
            await up.of("s").responses.create(model="m", input=[USER | {"content": "x"}, item])
            assert await rules(up) == [("item_id", 4)]
            text = (await up.http.get("/metrics")).text
            assert 'forge_replies_total{rule="content"} 2' in text

        async with served(StopEngine([*b"Act: x</code>"]), form) as up:
            await ask(up, USER, stop=["</code>"])
            await ask(up, USER, {"role": "assistant", "content": "Act: x</code>"}, USER)
            assert await rules(up) == [("content_with_stop", 0)]

    run(test)


def test_tokens_that_a_new_tokenisation_would_change_are_counted() -> None:
    """Sampled as bytes; the tokenizer has one token of "th"."""

    async def test() -> None:
        form = Chat(tokenizer=PairTokenizer(), format=built_in("chatml"))
        end = form.stop_ids[0]
        pieces = [*b"a the b", end]
        for output, changed in ((pieces, 2), ([*form.tokenizer.encode("a the b"), end], 0)):
            async with served(FakeEngine(lambda _, ids=output: ids), form) as up:
                reply = await ask(up, USER)
                await ask(up, USER, reply, USER)
                (told,) = (await up.turns("s"))[1]["replies"]
                assert (told["tokens"], told["retokenised"]) == (len(output), changed)
                text = (await up.http.get("/metrics")).text
                assert f"forge_retokenised_tokens_total {changed}" in text

    run(test)


def test_a_talk_that_the_template_writes_anew_counts_the_tokens_that_are_others() -> None:
    """The template drops the thoughts of all turns before the user's newest message."""

    async def test() -> None:
        form = chat("thinking")
        engine = text_engine(form, "<think>\nlong reason\n</think>\n\nAnswer.")
        async with served(engine, form) as up:
            reply = await ask(up, USER)
            await ask(up, USER, reply, USER)
            first, second = await up.turns("s")
            assert second["branch"] == "rerendered"
            assert [r["rule"] for r in second["replies"]] == ["not_kept"]
            before = first["prompt_ids"] + first["output_ids"]
            pairs = zip(before, second["prompt_ids"], strict=False)
            same = next(i for i, (a, b) in enumerate(pairs) if a != b)
            assert second["redone_tokens"] == len(before) - same > 0

    run(test)
